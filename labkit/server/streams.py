"""What does not end by itself: an event stream and a lease, each one connection that a thread reads.

When the connection ends, so does what it stood for: the ranks go back, the callbacks stop, and the reason is kept.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

Event = dict[str, Any]
_decode = msgspec.json.Decoder().decode


class ServerError(RuntimeError):
    """The server refused; the message is its sentence. `status` is HTTP's (0: it did not answer)."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class _Reader:
    """A response that does not end, read line by line; `close` from any thread unblocks the reader."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self._socket = connection.sock or _socket_of(response)
        self._connection, self._response = connection, response

    def lines(self) -> Iterator[Event]:
        """Raises OSError or HTTPException when the connection breaks."""
        for line in self._response:
            if line.strip():
                yield _decode(line)

    def shut(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut()
        self._response.close()
        self._connection.close()


def _socket_of(response: http.client.HTTPResponse) -> socket.socket:
    """A connection that will close hands its socket to the response."""
    return response.fp.raw._sock  # type: ignore[attr-defined]


_BROKEN = (OSError, http.client.HTTPException, ValueError, AttributeError)
"""What reading raises when a connection breaks, or is closed under the reader by another thread."""


class EventStream:
    """A thread that reads events. Close it, or use it as a context manager."""

    def __init__(
        self,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        callback: Callable[[Event], None],
        on_end: Callable[[str], None] | None,
    ) -> None:
        self._reader = _Reader(connection, response)
        self._callback, self._on_end = callback, on_end
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="labkit-events", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        why = "The lab server has ended."
        try:
            for event in self._reader.lines():
                self._callback(event)
        except _BROKEN as error:
            why = f"The lab server has gone: {error}."
        if self._on_end is not None and not self._is_closed:
            self._on_end(why)

    def close(self) -> None:
        self._is_closed = True
        self._reader.shut()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)
            self._reader.close()

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Lease:
    """The ranks, held. `lost` says why when the server or the connection went away under it."""

    def __init__(
        self,
        ask_release: Callable[[str], object],
        run_id: str,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        on_line: Callable[[Event], None] | None,
    ) -> None:
        self.run_id = run_id
        self.switched: Event | None = None
        """The switch's report (ready_s, parts); None when nothing had to change."""
        self.outcome: Event = {}
        """The newest of: run_id, held_s, foreign_requests, store_error."""
        self.lost = ""
        self._ask_release = ask_release
        self._reader = _Reader(connection, response)
        self._lines = self._reader.lines()
        self._on_line = on_line or (lambda line: None)
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def foreign_requests(self) -> int:
        """Requests of others that the engine served meanwhile."""
        return int(self.outcome.get("foreign_requests", 0))

    def await_grant(self) -> None:
        try:
            for line in self._lines:
                self._on_line(line)
                if line["lease"] == "failed":
                    raise ServerError(line["error"], line["status"])
                if line["lease"] == "granted":
                    self.switched = line["switch"]
                    break
            else:
                raise ServerError("The lab server ended while the lease waited in line.")
        except _BROKEN as error:
            raise ServerError(f"The lab server has gone while the lease waited in line: {error}.") from error
        self._thread = threading.Thread(target=self._follow, name="labkit-lease", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        self.lost = "The lab server ended the lease."
        try:
            for line in self._lines:
                self.outcome = line
                self._on_line(line)
                if line["lease"] == "released":
                    self.lost = ""
        except _BROKEN as error:
            self.lost = f"The lab server has gone: {error}."
        self._is_over.set()

    def check(self) -> None:
        """Raises ServerError when the lease is no longer held."""
        if self._is_over.is_set() and self.lost:
            raise ServerError(self.lost)

    def give_back(self) -> None:
        """Ask for the release and wait for the line that says it is written; a lost lease has nothing to give."""
        with contextlib.suppress(ServerError):
            self._ask_release(self.run_id)
            self._is_over.wait(timeout=60)

    def close(self) -> None:
        self._reader.shut()
        if self._thread is not None:
            self._thread.join(timeout=5)
        self._reader.close()
