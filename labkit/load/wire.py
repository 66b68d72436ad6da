"""The wire: warm keep-alive connections that stamp what arrives before they read it.

A connection takes one exchange (a request's bytes and its record) at a time. Every piece that arrives gets
its instant first, then goes through httptools and the answer's reader. The pool opens connections ahead of
need, so that no request pays for a handshake unless the load grows faster than connections can be made, and
counts those that did.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable

import httptools

from labkit.load.sse import AnswerStream, error_of_body
from labkit.load.target import Target
from labkit.measure.records import RequestRecord

_BUFFER_BYTES = 1 << 16
_ERROR_BYTES = 1 << 16
_MAX_CONNECTING = 64
_CONNECT_S = 30
_IDLE_RETRY_NS = 1_000_000_000
"""A connection idle for longer may be closed by the server just as it is used: then it is sent once more."""


class Exchange:
    """One request under way. `record` is filled as the answer comes; `on_end` is called once, at the end."""

    __slots__ = ("payload", "record", "on_end", "answer", "body", "connection", "retried", "settled")

    def __init__(self, payload: bytes, record: RequestRecord, on_end: Callable[[Exchange], None]) -> None:
        self.payload = payload
        self.record = record
        self.on_end = on_end
        self.answer = AnswerStream()
        self.body = bytearray()
        """What came with a status other than 200."""
        self.connection: Connection | None = None
        self.retried = False
        self.settled = False

    def settle(self, status: str, error: str = "", end_ns: int = 0) -> None:
        """Fixes the outcome (at `end_ns`, or now); what has arrived is kept whatever the outcome is."""
        if self.settled:
            return
        self.settled = True
        answer, record = self.answer, self.record
        answer.close()
        record.status, record.error = status, error
        record.end_ns = end_ns or time.monotonic_ns()
        record.chunk_ns, record.chunk_tokens = answer.chunk_ns, answer.chunk_tokens
        if answer.chunk_ns:
            record.first_ns, record.last_ns = answer.chunk_ns[0], answer.chunk_ns[-1]
        record.n, record.finish_reason = answer.n, answer.finish_reason
        record.prompt_tokens, record.cached_tokens = answer.prompt_tokens, answer.cached_tokens
        self.on_end(self)

    def complete(self, end_ns: int) -> None:
        """The whole answer was there at `end_ns`: says what it was."""
        http_status = self.record.http_status
        if http_status == 200:
            self.answer.close()
            error = self.answer.failure()
            self.settle("failed" if error else "completed", error, end_ns)
            return
        error = f"HTTP {http_status}: {error_of_body(bytes(self.body)) or 'no reason given'}"
        self.settle("refused" if 400 <= http_status < 500 else "failed", error, end_ns)


class Connection(asyncio.BufferedProtocol):
    """One TCP or TLS connection of a pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.exchange: Exchange | None = None
        self.idle_since_ns = 0
        self._now_ns = 0
        self._got_bytes = False
        self._framed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def start(self, exchange: Exchange) -> None:
        """Sends the exchange's bytes now."""
        assert self._transport is not None
        self.exchange = exchange
        exchange.connection = self
        self._got_bytes = self._framed = False
        exchange.record.sent_ns = time.monotonic_ns()
        self._transport.write(exchange.payload)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._pool.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._now_ns = time.monotonic_ns()
        self._got_bytes = True
        try:
            self._parser.feed_data(self._pool.buffer[:nbytes])
        except httptools.HttpParserError as error:
            self._fail(f"the server's answer is not HTTP: {error}")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        if self.exchange is not None:
            self.exchange.record.http_status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        exchange = self.exchange
        if exchange is None:
            return
        if exchange.record.http_status == 200:
            exchange.answer.feed(body, self._now_ns)
        elif len(exchange.body) < _ERROR_BYTES:
            exchange.body += body

    def on_message_complete(self) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is None or exchange.record.http_status < 200:
            self.exchange = exchange
            return
        if self._parser.should_keep_alive():
            self._pool.give_back(self)
        else:
            self.close()
        exchange.complete(self._now_ns)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        exchange, self.exchange = self.exchange, None
        if exchange is None or exchange.settled:
            return
        if not self._got_bytes and self._may_retry(exchange):
            exchange.retried = True
            self._pool.send(exchange)
            return
        answer = exchange.answer
        if answer.done or (answer.finish_reason and not self._framed):
            exchange.complete(self._now_ns)
            return
        told = "mid-stream" if answer.chunk_ns else "before the first token"
        exchange.settle("failed", f"the connection was cut {told}" + (f": {exc}" if exc else ""))

    def _may_retry(self, exchange: Exchange) -> bool:
        idle_ns = exchange.record.sent_ns - self.idle_since_ns
        return bool(self.idle_since_ns) and idle_ns > _IDLE_RETRY_NS and not exchange.retried

    def _fail(self, error: str) -> None:
        exchange, self.exchange = self.exchange, None
        self.close()
        if exchange is not None:
            exchange.settle("failed", error)

    def close(self) -> None:
        """Drops the connection at once; the server sees the client go away."""
        if self._transport is not None:
            self._transport.abort()


class Pool:
    """Keep-alive connections to one server. `num_cold` counts requests that had to wait for a handshake."""

    def __init__(self, target: Target, num_spare: int) -> None:
        self._address = target.address()
        self._tls = tls_context(target) if self._address.tls else None
        self.num_spare = num_spare
        """Connections kept idle for what comes."""
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._waiting: deque[Exchange] = deque()
        self._connecting: set[asyncio.Task[None]] = set()
        self._place: tuple[str, int] | None = None
        self._closed = False
        self.buffer = memoryview(bytearray(_BUFFER_BYTES))
        """Shared: it is filled and read within one callback."""
        self.num_cold = 0
        self.num_opened = 0

    async def warm(self, num_connections: int) -> None:
        """Opens connections until so many are idle, or the server takes no more (OSError: it takes none)."""
        await self._resolve()
        while not self._closed and len(self._idle) < num_connections:
            before = len(self._idle)
            batch = min(_MAX_CONNECTING, num_connections - before)
            done = await asyncio.gather(*(self._connect() for _ in range(batch)), return_exceptions=True)
            errors = [error for error in done if isinstance(error, BaseException)]
            if errors and not self._idle:
                raise errors[0]
            if errors:
                return

    async def _resolve(self) -> None:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self._address.host, self._address.port, type=1)
        self._place = str(found[0][4][0]), self._address.port

    async def _connect(self) -> None:
        if self._place is None:
            await self._resolve()
        assert self._place is not None
        name = self._address.host if self._tls else None
        making = asyncio.get_running_loop().create_connection(
            lambda: Connection(self), *self._place, ssl=self._tls, server_hostname=name
        )
        _, connection = await asyncio.wait_for(making, _CONNECT_S)
        if self._closed:
            connection.close()
            return
        self.num_opened += 1
        self._all.add(connection)
        self.give_back(connection)

    def send(self, exchange: Exchange) -> None:
        """Sends on an idle connection, or on the next one that opens."""
        if self._idle:
            self._idle.pop().start(exchange)
        else:
            self.num_cold += 1
            self._waiting.append(exchange)
        self._top_up()

    def _top_up(self) -> None:
        wanted = self.num_spare + len(self._waiting) - len(self._idle) - len(self._connecting)
        for _ in range(min(wanted, _MAX_CONNECTING - len(self._connecting))):
            task = asyncio.get_running_loop().create_task(self._connect())
            self._connecting.add(task)
            task.add_done_callback(self._connected)

    def _connected(self, task: asyncio.Task[None]) -> None:
        self._connecting.discard(task)
        if task.cancelled() or self._closed:
            return
        error = task.exception()
        if error is not None and self._waiting and not self._idle:
            host = f"{self._address.host}:{self._address.port}"
            reason = str(error) or type(error).__name__
            self._waiting.popleft().settle("failed", f"could not connect to {host}: {reason}")
        if self._waiting:
            self._top_up()

    def give_back(self, connection: Connection) -> None:
        """A connection is free: it takes the longest-waiting exchange, or rests."""
        while self._waiting:
            exchange = self._waiting.popleft()
            if not exchange.settled:
                connection.start(exchange)
                return
        connection.idle_since_ns = time.monotonic_ns()
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    async def close(self) -> None:
        """Drops every connection. Safe to call twice."""
        self._closed = True
        for task in self._connecting:
            task.cancel()
        for connection in list(self._all):
            connection.close()
        await asyncio.sleep(0)


def tls_context(target: Target) -> ssl.SSLContext:
    """Verifying, with the system's certificates or the target's own file."""
    return ssl.create_default_context(cafile=target.ca_file or None)
