"""A small synchronous client of the lab server, for notebooks, pages and shells.

http.client and threads, nothing heavier: a page's kernel pays for every import, once per visitor.
"""

from __future__ import annotations

import contextlib
import http.client
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from labkit.server.streams import Event, EventStream, Lease, ServerError

__all__ = ["EventStream", "Lease", "ServerClient", "ServerError", "whoami"]

CONNECT_TIMEOUT_S = 10.0
SILENCE_S = 15.0
"""A lease or an event stream speaks every few seconds; after this much silence its server is gone."""
SWITCH_TIMEOUT_S = 120.0
MEASURE_SILENCE_S = 90.0
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class ServerClient:
    """Talks to one lab server. Every call opens a connection of its own, so threads may share a client."""

    def __init__(self, url: str, token: str = "") -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is not a lab server's address: it looks like http://127.0.0.1:8100.")
        self.url = url.rstrip("/")
        self.token = token
        self._host, self._port = parts.hostname, parts.port or 80

    # ---- one question, one answer

    def health(self) -> str:
        """starting, ready, switching, restarting or failed."""
        return str(self._ask("GET", "/health")["status"])

    def state(self) -> dict[str, Any]:
        return self._ask("GET", "/lab/state")

    def choices(self) -> dict[str, Any]:
        """Every layout that there is to choose, and why not the others (`labkit.layout.choice_table`)."""
        return self._ask("GET", "/lab/choices")

    def fabric(self) -> dict[str, Any]:
        """What joins the ranks: `measured` (last here, or None), `messages` of the layout, `machine`, `progress`."""
        return self._ask("GET", "/lab/bench")

    def measure_fabric(self, on_line: Callable[[Event], None] = lambda line: None, client: str = "") -> dict[str, Any]:
        """Measure it now; `on_line` sees how far it is. Raises ServerError (409: the ranks are at work)."""
        with self._open("POST", "/lab/bench", {"client": client or whoami()}, MEASURE_SILENCE_S) as response:
            for text in response:
                line = _decode(text)
                if line["bench"] == "done":
                    return dict(line)
                if line["bench"] == "failed":
                    raise ServerError(line["error"], line["status"])
                on_line(line)
        raise ServerError(f"The lab server at {self.url} ended in the middle of the measurement.")

    def models(self) -> list[str]:
        return [card["id"] for card in self._ask("GET", "/v1/models")["data"]]

    def switch(
        self, layout: str = "", *, run_id: str = "", probe: bool = True, client: str = "", **settings: Any
    ) -> dict[str, Any]:
        """Returns layout, ready_s, first_token_s (with probe) and parts. ServerError 409 when others hold the ranks."""
        body = {"layout": layout, "settings": settings, "run_id": run_id, "probe": probe}
        return self._ask("POST", "/lab/switch", body | {"client": client or whoami()}, SWITCH_TIMEOUT_S)

    def fault(self, rank: int, kind: str, seconds: float = 0.0, layer: int = -1) -> None:
        body = {"rank": rank, "kind": kind, "seconds": seconds, "layer": layer}
        self._ask("POST", "/lab/fault", body)

    def profile(self, run_id: str, ranks: Iterable[int] = (0,), skip: int = 0, steps: int = 20) -> None:
        """Have ranks profile their next steps, while the run holds them; event `profile` says when one has."""
        self._ask("POST", "/lab/profile", {"run_id": run_id, "ranks": list(ranks), "skip": skip, "steps": steps})

    def set_links(self, links: list[dict[str, str]]) -> None:
        """What the landing page lists: title, url, description."""
        self._ask("POST", "/lab/links", {"links": links})

    def release(self, run_id: str) -> None:
        """Give a lease back early; leaving the `lease` block does it too."""
        self._ask("POST", "/lab/release", {"run_id": run_id})

    def shutdown(self) -> None:
        self._ask("POST", "/lab/shutdown", {})

    def complete(self, prompt: str | list[int], *, timeout_s: float = 600.0, **fields: Any) -> dict[str, Any]:
        """The whole answer of /v1/completions."""
        return self._ask("POST", "/v1/completions", {"prompt": prompt, **fields}, timeout_s)

    def chat(self, messages: list[dict[str, str]], *, timeout_s: float = 600.0, **fields: Any) -> dict[str, Any]:
        return self._ask("POST", "/v1/chat/completions", {"messages": messages, **fields}, timeout_s)

    def stream(self, prompt: str | list[int], *, timeout_s: float = 600.0, **fields: Any) -> Iterator[dict[str, Any]]:
        """Chunks of /v1/completions as they come. Closing the iterator cancels the request."""
        body = {"prompt": prompt, "stream": True, **fields}
        with self._open("POST", "/v1/completions", body, timeout_s) as response:
            for line in response:
                if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                    chunk = _decode(line[6:])
                    _raise_if_error(chunk)
                    yield chunk

    # ---- streams

    def events(
        self,
        callback: Callable[[Event], None],
        kinds: Iterable[str] = (),
        run_id: str = "",
        on_end: Callable[[str], None] | None = None,
    ) -> EventStream:
        """Call `callback(event)` for each event, on a thread, until closed; `on_end(why)` when the server went."""
        query = urllib.parse.urlencode({"kinds": ",".join(kinds), "run": run_id})
        connection, response = self._send("GET", f"/lab/events?{query}", None, SILENCE_S)
        return EventStream(connection, response, callback, on_end)

    @contextlib.contextmanager
    def lease(
        self,
        run_id: str,
        *,
        purpose: str = "a run",
        client: str = "",
        layout: str = "",
        settings: dict[str, Any] | None = None,
        expected_s: float = 0.0,
        on_line: Callable[[Event], None] | None = None,
    ) -> Iterator[Lease]:
        """Hold the ranks for the length of the block; waits in line first.

        `on_line` sees every line of the lease (queued with position and eta_s, switching, granted, held), on whichever
        thread reads it. Raises ServerError when the lease is refused or its switch fails. Leaving the block gives the
        ranks back and waits until the run's record is written; `lease.outcome` then says how it went.
        """
        body = {
            "client": client or whoami(),
            "run_id": run_id,
            "purpose": purpose,
            "layout": layout,
            "settings": settings or {},
            "expected_s": expected_s,
        }
        connection, response = self._send("POST", "/lab/lease", body, SILENCE_S)
        lease = Lease(self.release, run_id, connection, response, on_line)
        try:
            lease.await_grant()
            yield lease
            lease.give_back()
        finally:
            lease.close()

    # ---- plumbing

    def _ask(self, method: str, path: str, body: Any = None, timeout_s: float = CONNECT_TIMEOUT_S) -> dict[str, Any]:
        with self._open(method, path, body, timeout_s) as response:
            answer: dict[str, Any] = _decode(response.read())
            return answer

    @contextlib.contextmanager
    def _open(self, method: str, path: str, body: Any, timeout_s: float) -> Iterator[http.client.HTTPResponse]:
        connection, response = self._send(method, path, body, timeout_s)
        try:
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"The lab server at {self.url} broke off: {error}.") from error
        finally:
            response.close()
            connection.close()

    def _send(
        self, method: str, path: str, body: Any, timeout_s: float
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        try:
            data = None if body is None else _encode(body)
            connection.request(method, path, data, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ServerError(f"The lab server at {self.url} does not answer: {error}.") from error
        if response.status >= 400:
            with contextlib.closing(connection):
                raise ServerError(_sentence(response), response.status)
        return connection, response


def whoami() -> str:
    """How a holder of the ranks is called in front of others: user and process."""
    import getpass
    import os

    with contextlib.suppress(KeyError, OSError):
        return f"{getpass.getuser()} (process {os.getpid()})"
    return f"process {os.getpid()}"


def _sentence(response: http.client.HTTPResponse) -> str:
    data = response.read()
    try:
        return str(_decode(data)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"HTTP {response.status}: {data[:200].decode('utf-8', 'replace')}"


def _raise_if_error(chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        raise ServerError(chunk["error"]["message"], chunk["error"].get("code", 0))
