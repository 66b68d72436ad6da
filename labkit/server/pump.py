"""A stream after its first chunk: from the engine's hand straight to the socket.

Waking a task for every token of every stream, and passing it through a response writer, costs more than making the
chunk. So the pump listens to the request's stream and writes to the transport itself, framed as HTTP's chunked coding
asks; the response takes over again for the last chunk. A slow reader's bytes wait in the transport's buffer, which an
answer's length bounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from labkit.engine.stream import EngineDown, Output


class Pump:
    """A listener for `RequestStream.listen`. `last_chunk` is the answer's end, unwritten, or what went wrong."""

    def __init__(self, transport: asyncio.Transport, next_chunk: Callable[[Output], tuple[bytes, bool]]) -> None:
        """`next_chunk(output)`: the bytes to send for a piece, and whether it is the last."""
        self.last_chunk: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._transport = transport
        self._next_chunk = next_chunk

    def __call__(self, output: Output | EngineDown) -> None:
        if self.last_chunk.done():
            return
        try:
            self._send(output)
        except Exception as error:  # the handler's to tell; the engine's turn goes on
            self.last_chunk.set_exception(error)

    def _send(self, output: Output | EngineDown) -> None:
        if isinstance(output, EngineDown):
            raise output
        chunk, is_last = self._next_chunk(output)
        if is_last:
            self.last_chunk.set_result(chunk)
        elif self._transport.is_closing():
            raise ConnectionResetError("the client has gone")
        else:
            self._transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
