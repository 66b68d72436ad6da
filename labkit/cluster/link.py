"""The engine's end of a rank's two sockets: frames in and out on asyncio, without a task per message.

A connection is nobody until its first message, a `Hello` with the pool's secret; what says anything else is
closed. The socket is a file in a private folder, loopback TCP where that path would be too long for the system, or
a given port where ranks come from other machines. Who connects is told to the listener by plain calls from
`data_received`, so a step's answer reaches the scheduler in one hop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from labkit.engine.messages import EngineMessage, Hello, RankMessage, decode_rank_message, encode

_LENGTH = struct.Struct("<I")
_MAX_FRAME_BYTES = 1 << 28
_MAX_HELLO_BYTES = 1 << 14
_HELLO_TIMEOUT_S = 10.0
_READ_BYTES = 1 << 18
_MAX_PATH_BYTES = 100
"""sockaddr_un holds 108 bytes on Linux and 104 on macOS."""


def frame(message: EngineMessage) -> bytes:
    payload = encode(message)
    return _LENGTH.pack(len(payload)) + payload


class Listener(Protocol):
    """What a link tells its owner."""

    def joined(self, link: RankLink, hello: Hello) -> None: ...

    def received(self, rank: int, message: RankMessage) -> None: ...

    def lost(self, link: RankLink) -> None: ...


class RankLink(asyncio.Protocol):
    """One connection of one rank. `rank` is -1 until it has said who it is."""

    def __init__(self, token: str, listener: Listener) -> None:
        self.rank = -1
        self.lifeline = False
        self._token = token
        self._listener = listener
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._patience = asyncio.get_running_loop().call_later(_HELLO_TIMEOUT_S, self.close)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= 4:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > (_MAX_HELLO_BYTES if self.rank < 0 else _MAX_FRAME_BYTES):
                return self.close()
            end = start + 4 + length
            if len(buffer) < end:
                break
            payload = bytes(buffer[start + 4 : end])
            start = end
            self._take(payload)
        del buffer[:start]
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        transport, self._transport = self._transport, None
        if isinstance(exc, ConnectionError) and self.rank >= 0 and transport is not None:
            self._hear_out(transport)
        if self.rank >= 0:
            self._listener.lost(self)

    def _hear_out(self, transport: asyncio.Transport) -> None:
        """What the rank said before it ended, where a write to it failed before that was read: asyncio reads no more
        then, and its last words would be lost."""
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as end,
        ):
            end.setblocking(False)
            while data := end.recv(_READ_BYTES):
                self.data_received(data)

    def say_goodbye(self) -> None:
        """On a lifeline: the owner ends on purpose, and the rank need not be started again."""
        self.write(b"goodbye")

    def write(self, data: bytes) -> None:
        """Hand a frame to the kernel (or to the transport's buffer). Nothing when the connection is over."""
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _take(self, payload: bytes) -> None:
        try:
            message = decode_rank_message(payload)
        except msgspec.DecodeError:
            return self.close()
        if self.rank >= 0:
            return self._listener.received(self.rank, message)
        if isinstance(message, Hello) and hmac.compare_digest(message.token.encode(), self._token.encode()):
            self._stop_waiting()
            self.rank, self.lifeline = message.rank, message.lifeline
            return self._listener.joined(self, message)
        return self.close()

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


async def listen(
    folders: Sequence[Path], token: str, listener: Listener, tcp: tuple[str, int] | None = None
) -> tuple[asyncio.Server, str]:
    """A server for the ranks of one pool, and its address as `labkit.engine.channel.dial` takes it.

    folders: private ones; the first whose path is short enough for a socket is taken. tcp: host and port for
    ranks on other machines instead; the secret then crosses the network as it is.
    """
    loop = asyncio.get_running_loop()
    paths = [folder / "control.sock" for folder in folders]

    def make_link() -> RankLink:
        return RankLink(token, listener)

    if tcp is not None:
        return await loop.create_server(make_link, *tcp), f"tcp:{tcp[0]}:{tcp[1]}"
    for path in paths:
        if len(os.fsencode(path)) <= _MAX_PATH_BYTES:
            return await loop.create_unix_server(make_link, path), f"unix:{path}"
    server = await loop.create_server(make_link, "127.0.0.1", 0)
    return server, f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}"
