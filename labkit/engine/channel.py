"""A rank's end of its sockets: framed messages on the control one, silence on the lifeline.

A rank that waits for work is blocked in `recv` and uses no CPU. The lifeline says nothing; it closes when
the owner goes, however it goes, and then the rank must go as well, even in the middle of a collective.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 16


def dial(address: str, timeout_s: float = 20.0) -> socket.socket:
    """Connect to `unix:/path` or `tcp:host:port`. ValueError when it is neither."""
    kind, _, rest = address.partition(":")
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout_s)
        sock.connect(rest)
    elif kind == "tcp":
        host, _, port = rest.rpartition(":")
        sock = socket.create_connection((host, int(port)), timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    else:
        raise ValueError(f"{address!r} is no address of an engine; it looks like unix:/path or tcp:host:port")
    sock.settimeout(None)
    return sock


class Channel:
    """Length-prefixed messages over one blocking socket. Not for two threads at once."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()

    def send(self, payload: bytes) -> None:
        self._sock.sendall(_LENGTH.pack(len(payload)) + payload)

    def ready(self, timeout_s: float) -> bool:
        """Whether a message, or its beginning, is there within the time."""
        return bool(self._buffer or select.select([self._sock], [], [], timeout_s)[0])

    def receive(self) -> bytes | None:
        """The next message, or None when the other end has closed."""
        head = self._take(4)
        return None if head is None else self._take(_LENGTH.unpack(head)[0])

    def _take(self, count: int) -> bytes | None:
        buffer = self._buffer
        while len(buffer) < count:
            data = self._sock.recv(max(_READ_BYTES, count - len(buffer)))
            if not data:
                return None
            buffer += data
        taken = bytes(buffer[:count])
        del buffer[:count]
        return taken

    def close(self) -> None:
        self._sock.close()


def wait_for_end(sock: socket.socket) -> bool:
    """Block until the lifeline ends; whether its owner said goodbye before (one byte or more)."""
    said_goodbye = False
    try:
        while sock.recv(64):
            said_goodbye = True
    except OSError:
        pass
    return said_goodbye


def hold_lifeline(sock: socket.socket, on_end: Callable[[], object]) -> None:
    """Block until the lifeline ends, then call on_end. Run it in a daemon thread."""
    wait_for_end(sock)
    on_end()
