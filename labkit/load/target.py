"""Whom we ask, and in which words: the address of a server, and requests written to bytes before they are
needed.

Servers differ in what they accept beside the plain OpenAI fields, so the options that a measurement profits
from are asked for first and given up one by one when a trial request is refused (`wire.negotiate`). A target
that takes only text is asked in words, whose ratio to tokens is learnt from the same trial.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec
import numpy as np

from labkit.load.schedule import PlannedRequest

ENDPOINTS = ("completions", "chat")
PROMPT_MODES = ("ids", "text")
_AHEAD_BYTES = 64 << 20
_TEXT = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work number night point home water room
mother area money story fact month lot right study book eye job word business issue side kind head house
service friend father power hour game line end member law car city name team minute idea body back parent
face level office door health art war party result change morning reason moment air teacher force
"""
WORDS = tuple(_TEXT.split())


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server to ask. Raises ValueError with a sentence when its address or modes make no sense."""

    url: str
    """http(s)://host:port, with or without /v1."""
    token: str = ""
    model: str = ""
    """Empty: the first that the server lists."""
    endpoint: str = "completions"
    prompt_mode: str = "ids"
    labkit: bool = False
    """It is our own server: every option is known to work, no trial request is sent."""
    timeout_s: float = 600.0
    ca_file: str = ""
    """Certificates to trust instead of the system's."""

    def __post_init__(self) -> None:
        if self.endpoint not in ENDPOINTS:
            raise ValueError(f"endpoint {self.endpoint!r} is not known; choose completions or chat.")
        if self.prompt_mode not in PROMPT_MODES:
            raise ValueError(f"prompt mode {self.prompt_mode!r} is not known; choose ids or text.")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0; got {self.timeout_s}.")
        self.address()

    def address(self) -> Address:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{self.url!r} is no server address; give one like http://127.0.0.1:8000.")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/")
        base = path if path.endswith("/v1") else f"{path}/v1"
        port = parts.port or (443 if tls else 80)
        return Address(parts.hostname, port, tls, parts.netloc.rpartition("@")[2], base)

    @property
    def sends_text(self) -> bool:
        """Chat endpoints take messages, which are text."""
        return self.prompt_mode == "text" or self.endpoint == "chat"


@dataclass(frozen=True)
class Address:
    """A URL taken apart. `base` is the path up to and with /v1."""

    host: str
    port: int
    tls: bool
    header: str
    base: str


@dataclass(frozen=True)
class Dialect:
    """What the server was found to understand."""

    usage: bool = True
    continuous_usage: bool = True
    ignore_eos: bool = True
    token_ids: bool = False
    words_per_token: float = 1.0
    overhead_tokens: int = 0
    """Tokens that the server adds to every text prompt (chat template, begin of text)."""


@dataclass
class RequestWriter:
    """Writes whole HTTP/1.1 requests. One for a run: everything but prompt, length and id is fixed."""

    target: Target
    run_id: str
    model: str
    dialect: Dialect = field(default_factory=Dialect)
    temperature: float = 0.0
    ignore_eos: bool = True

    def __post_init__(self) -> None:
        address = self.target.address()
        path = "chat/completions" if self.target.endpoint == "chat" else "completions"
        lines = [
            f"POST {address.base}/{path} HTTP/1.1",
            f"Host: {address.header}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            f"X-Labkit-Run: {self.run_id}",
        ]
        if self.target.token:
            lines.append(f"Authorization: Bearer {self.target.token}")
        self._head = "\r\n".join(lines)
        self._fixed = self._fixed_fields()

    def _fixed_fields(self) -> dict[str, object]:
        dialect = self.dialect
        fields: dict[str, object] = {"model": self.model, "stream": True, "temperature": self.temperature}
        if dialect.usage:
            fields["stream_options"] = {"include_usage": True}
            if dialect.continuous_usage:
                fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        if dialect.ignore_eos and self.ignore_eos:
            fields["ignore_eos"] = True
        if dialect.token_ids:
            fields["return_token_ids"] = True
        return fields

    def request_id(self, index: int) -> str:
        return f"{self.run_id}-{index}"

    def write(self, request: PlannedRequest) -> bytes:
        """The bytes of one request."""
        fields = {**self._fixed, "max_tokens": request.max_tokens, **self._prompt(request.prompt_ids)}
        body = msgspec.json.encode(fields)
        own = f"X-Request-Id: {self.request_id(request.index)}\r\nContent-Length: {len(body)}"
        return f"{self._head}\r\n{own}\r\n\r\n".encode() + body

    def _prompt(self, ids: np.ndarray) -> dict[str, object]:
        if not self.target.sends_text:
            return {"prompt": ids.tolist()}
        text = self.text(ids)
        if self.target.endpoint == "chat":
            return {"messages": [{"role": "user", "content": text}]}
        return {"prompt": text}

    def text(self, ids: np.ndarray) -> str:
        """Words that come to about as many tokens as there are ids; equal beginnings stay equal."""
        ratio = self.dialect.words_per_token
        num_words = max(1, round((len(ids) - self.dialect.overhead_tokens) * ratio))
        places = np.minimum(np.arange(num_words) / ratio, len(ids) - 1).astype(np.int64)
        return " ".join(WORDS[word % len(WORDS)] for word in ids[places].tolist())


class WrittenAhead:
    """A schedule's requests as bytes before they are due, within a bound of memory (64 MiB)."""

    def __init__(self, planned: Iterator[PlannedRequest], writer: RequestWriter) -> None:
        self._planned, self._writer = planned, writer
        self._ready: deque[tuple[PlannedRequest, bytes]] = deque()
        self._num_bytes = 0

    def fill(self, num_requests: int) -> None:
        """Writes until so many are ready, the bound is reached or the schedule is at its end."""
        while len(self._ready) < num_requests and self._num_bytes < _AHEAD_BYTES:
            request = next(self._planned, None)
            if request is None:
                return
            payload = self._writer.write(request)
            self._ready.append((request, payload))
            self._num_bytes += len(payload)

    def first(self) -> PlannedRequest | None:
        """What is next, None at the end."""
        self.fill(1)
        return self._ready[0][0] if self._ready else None

    def take(self) -> tuple[PlannedRequest, bytes]:
        """The next request and its bytes. Raises IndexError at the end."""
        self.fill(1)
        request, payload = self._ready.popleft()
        self._num_bytes -= len(payload)
        return request, payload
