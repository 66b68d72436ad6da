"""Whose clock an instant was read from, and how far two of them are apart.

CLOCK_MONOTONIC is common to everything on one host (namespaces of the network make no difference, those of time do).
An instant from another host is translated by the smallest difference ever seen between "read here" and "read there":
that is the true offset plus the fastest way over the network, a few tenths of a millisecond, and it is allowed to grow
as far as two clocks may drift apart.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

import numpy as np

from labkit.engine.messages import Hello, RankMessage, Sampled, StepStats
from labkit.measure.recorder import RING_DTYPE

_DRIFT = 50e-6
"""Seconds a second that two hosts' clocks may drift apart."""


def clock_id() -> str:
    """Equal in two processes exactly when their monotonic instants can be compared."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts = [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/time")]
    return " ".join(parts)


class Offset:
    """Of one foreign clock: add it to an instant read there."""

    def __init__(self, there_ns: int, here_ns: int) -> None:
        self.ns = here_ns - there_ns
        self._since_ns = here_ns

    def learn(self, there_ns: int, here_ns: int) -> None:
        """An instant read there has arrived here."""
        drifted = self.ns + int((here_ns - self._since_ns) * _DRIFT)
        self.ns, self._since_ns = min(drifted, here_ns - there_ns), here_ns


class Clocks:
    """The clocks of a pool's ranks, beside this process's own."""

    def __init__(self) -> None:
        self._mine = clock_id()
        self._foreign: dict[int, Offset] = {}

    def joined(self, hello: Hello, now_ns: int) -> None:
        if hello.clock and hello.clock != self._mine:
            self._foreign[hello.rank] = Offset(hello.clock_ns, now_ns)

    def translate(self, rank: int, message: RankMessage) -> None:
        """Put a message's instants on this process's clock, in place."""
        offset = self._foreign.get(rank)
        if offset is None or not isinstance(message, Sampled | StepStats):
            return
        offset.learn(message.end_ns, time.monotonic_ns())
        message.start_ns += offset.ns
        message.end_ns += offset.ns
        if isinstance(message, StepStats):
            message.ring = _shifted(message.ring, offset.ns)


def _shifted(ring: bytes, offset_ns: int) -> bytes:
    rows = np.frombuffer(ring, RING_DTYPE).copy()
    rows["enter_ns"] += offset_ns
    rows["exit_ns"] += offset_ns
    return rows.tobytes()
