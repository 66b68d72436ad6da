"""What an answer's bytes mean: events of a stream, and how many tokens each of them bears.

A chunk bears the tokens that its `token_ids` or its running usage say; only when it says neither, a text that
is not empty counts as one. So a role-only chunk and an empty one bear none, half a character (empty text)
bears one, and four tokens in a chunk are four. `n` is the server's own count at the end, never the length
that was asked for.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

_HEAD_BYTES = 4096
"""How much of an answer that is no stream is kept to say what it was."""


class _Delta(msgspec.Struct, gc=False):
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None


class _Choice(msgspec.Struct, gc=False):
    text: Any = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk, strict=False).decode


class AnswerStream:
    """Reads one answer. `feed` takes bytes as they come, split anywhere; `close` settles the counts.

    chunk_ns, chunk_tokens: instants and tokens of the chunks that bore tokens. n: completion_tokens, or the
    sum of chunk_tokens when the server never said. error: what the stream itself reported, or "".
    """

    def __init__(self) -> None:
        self.chunk_ns: list[int] = []
        self.chunk_tokens: list[int] = []
        self.n = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.finish_reason = ""
        self.error = ""
        self.done = False
        self.saw_event = False
        self.estimated = False
        """Where the tokens lie in the chunks had to be estimated from their texts."""
        self._running = 0
        """Highest completion_tokens seen so far."""
        self._counted = 0
        self._text_sizes: list[int] = []
        self._guessed = False
        self._pending = b""
        self._last_ns = 0
        self._data: list[bytes] = []
        self._head = b""

    def feed(self, body: bytes, now_ns: int) -> None:
        """One piece of the body, which arrived at `now_ns`."""
        if not self._pending and body.startswith(b"data: {") and body.endswith(b"}\n\n") and body.count(b"\n") == 2:
            self._event(body[6:-2], now_ns)
            return
        if not self.saw_event and len(self._head) < _HEAD_BYTES:
            self._head += body[:_HEAD_BYTES]
        self._last_ns = now_ns
        lines = (self._pending + body).replace(b"\r\n", b"\n").split(b"\n")
        self._pending = lines.pop()
        for line in lines:
            self._line(line, now_ns)

    def _line(self, line: bytes, now_ns: int) -> None:
        line = line.rstrip(b"\r")
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif not line and self._data:
            data, self._data = b"\n".join(self._data), []
            self._event(data, now_ns)

    def _event(self, data: bytes, now_ns: int) -> None:
        self.saw_event = True
        if data.strip() == b"[DONE]":
            self.done = True
            return
        chunk: _Chunk | None
        try:
            chunk = _decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            chunk = self._mended(data)
        if chunk is not None:
            self._take(chunk, now_ns)

    def _mended(self, data: bytes) -> _Chunk | None:
        """A chunk whose text is not valid UTF-8 (half a character) is still a chunk."""
        try:
            return msgspec.convert(json.loads(data.decode("utf-8", "replace"), strict=False), _Chunk, strict=False)
        except (ValueError, msgspec.MsgspecError):
            self.error = self.error or f"the server sent an event that is no JSON chunk: {_short(data)}"
            return None

    def _take(self, chunk: _Chunk, now_ns: int) -> None:
        if chunk.error is not None:
            self.error = self.error or error_text(chunk.error)
            return
        if chunk.usage is not None:
            self._take_usage(chunk.usage)
        if not chunk.choices:
            return
        choice = chunk.choices[0]
        self.finish_reason = choice.finish_reason or self.finish_reason
        text = _text(choice)
        tokens = self._borne(choice, chunk.usage, text)
        if tokens > 0:
            self._counted += tokens
            self.chunk_ns.append(now_ns)
            self.chunk_tokens.append(tokens)
            self._text_sizes.append(len(text))

    def _take_usage(self, usage: _Usage) -> None:
        if usage.completion_tokens is not None:
            self._running = max(self._running, usage.completion_tokens)
        self.prompt_tokens = usage.prompt_tokens or self.prompt_tokens
        if usage.prompt_tokens_details is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens or self.cached_tokens

    def _borne(self, choice: _Choice, usage: _Usage | None, text: str) -> int:
        if choice.token_ids is not None:
            return len(choice.token_ids)
        if usage is not None and usage.completion_tokens is not None:
            return usage.completion_tokens - self._counted
        self._guessed = self._guessed or bool(text)
        return 1 if text else 0

    def close(self) -> None:
        """Settles `n`; where tokens were only guessed from texts, shares the server's count out by length."""
        for line in (self._pending, b""):  # a last event may lack its blank line
            self._line(line, self._last_ns)
        self._pending = b""
        self.n = self._running or self._counted
        self.estimated = self._guessed and self.n > self._counted > 0
        if self.estimated:
            self.chunk_tokens = _shared_out(self.n, self._text_sizes)

    def failure(self) -> str:
        """Why this is no whole answer, or "" when it is one. To be asked after `close`."""
        if self.error:
            return self.error
        if not self.saw_event:
            what = _short(self._head) or "nothing at all"
            return f"the answer was not a stream of events; it began with: {what}"
        if self.finish_reason in ("error", "abort"):
            return f"the server ended the answer early (finish_reason {self.finish_reason!r})"
        if not self.done and not self.finish_reason:
            return "the stream ended before the answer did (no finish_reason and no [DONE])"
        return ""


def _text(choice: _Choice) -> str:
    if choice.delta is None:
        return choice.text or ""
    delta = choice.delta
    return delta.content or delta.reasoning_content or delta.reasoning or ""


def _shared_out(num_tokens: int, sizes: list[int]) -> list[int]:
    """`num_tokens` over chunks in proportion to their text, at least one each: all that texts can tell."""
    spare, total = num_tokens - len(sizes), sum(sizes)
    edges, passed = [0], 0
    for size in sizes:
        passed += size
        edges.append(round(spare * passed / total))
    return [1 + after - before for before, after in zip(edges, edges[1:], strict=False)]


def _short(data: bytes, limit: int = 200) -> str:
    text = " ".join(data.decode("utf-8", "replace").split())
    return text if len(text) <= limit else text[:limit] + "…"


def error_text(error: Any) -> str:
    """The sentence inside an error object, whatever its form."""
    if isinstance(error, dict):
        for key in ("message", "detail", "error", "msg"):
            if error.get(key):
                return error_text(error[key])
    if isinstance(error, str):
        return error
    return json.dumps(error)


def error_of_body(body: bytes) -> str:
    """The sentence of an error answer: of its JSON when it is JSON, else its first words."""
    try:
        return error_text(json.loads(body))
    except (ValueError, UnicodeDecodeError):
        return _short(body)
