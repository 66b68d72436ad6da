"""An HTTP server that says exactly what a test tells it to, byte for byte and pause for pause.

Its script answers a request with a list of steps: bytes to send, seconds to wait, or CUT for the connection.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from typing import Any

CUT = object()
Steps = list[Any]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def piece(body: bytes) -> bytes:
    """One piece of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(body), body)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: str = "a", finish: str | None = None, **choice: Any) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish, **choice}])


def usage(prompt: int, completion: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion})


DONE = b"data: [DONE]\n\n"


def answer(num_tokens: int, gap_s: float = 0.0) -> Steps:
    """A whole, plain answer."""
    steps: Steps = [HEAD]
    for index in range(num_tokens):
        last = index == num_tokens - 1
        steps += [gap_s, piece(token("a", "length" if last else None))]
    return [*steps, piece(usage(3, num_tokens)), piece(DONE), END]


def refusal(status: int, body: bytes) -> Steps:
    return [b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)]


class Request:
    def __init__(self, head: bytes, body: bytes, arrived_ns: int) -> None:
        self.path = head.split(b" ")[1].decode()
        lines = head.decode().split("\r\n")[1:]
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
        self.fields = json.loads(body) if body else {}
        self.arrived_ns = arrived_ns


class ScriptedServer:
    """`script(request)` gives the steps of its answer. `requests` are those that arrived, in order."""

    def __init__(self, script: Callable[[Request], Steps], tls: ssl.SSLContext | None = None) -> None:
        self._script, self._tls = script, tls
        self.requests: list[Request] = []
        self.num_gone = 0
        """Clients that went away before their answer was over."""
        self._serving: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ScriptedServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        scheme = "https" if self._tls else "http"
        self.url = f"{scheme}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = next(
                    (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")),
                    0,
                )
                request = Request(head, await reader.readexactly(size), time.monotonic_ns())
                self.requests.append(request)
                await self._answer(self._script(request), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            self._serving.discard(task)
        finally:
            writer.close()

    async def _answer(self, steps: Steps, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for step in steps:
            if reader.at_eof() or writer.is_closing():
                self.num_gone += 1
                raise ConnectionError
            if step is CUT:
                await writer.drain()
                writer.transport.abort()
                raise ConnectionError
            if isinstance(step, bytes):
                writer.write(step)
            else:
                await asyncio.sleep(step)
