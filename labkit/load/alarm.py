"""Waking an event loop at an instant, not a millisecond after it.

asyncio rounds its waits up to whole milliseconds of epoll. On Linux a timerfd wakes the loop instead, a
little early, and the last stretch (at most 0.1 ms) is spun away; elsewhere the loop's own timer is used the
same way. Instants are nanoseconds of CLOCK_MONOTONIC, which is what `time.monotonic_ns` reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable

SPIN_NS = 100_000
_TFD_TIMER_ABSTIME = 1
_TFD_NONBLOCK_CLOEXEC = 0o4000 | 0o2000000
_CLOCK_MONOTONIC = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))


def spin_until(at_ns: int) -> None:
    """Holds the thread until `at_ns`, when that is no more than SPIN_NS away."""
    if at_ns - time.monotonic_ns() <= 2 * SPIN_NS:
        while time.monotonic_ns() < at_ns:
            pass


class Alarm:
    """Calls `on_time` from the running loop shortly before the instant last set. One instant at a time."""

    def __init__(self, on_time: Callable[[], None]) -> None:
        self._on_time = on_time
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._fd = self._open()
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._ring)

    @property
    def precise(self) -> bool:
        """Whether a timerfd does the waking."""
        return self._fd >= 0

    def _open(self) -> int:
        if not sys.platform.startswith("linux"):
            return -1
        self._libc = ctypes.CDLL(None, use_errno=True)
        return int(self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK_CLOEXEC))

    def set(self, at_ns: int) -> None:
        """Replaces the instant; one that has passed rings at once."""
        wake_ns = max(1, at_ns - SPIN_NS)
        if self._fd < 0:
            self._cancel_handle()
            self._handle = self._loop.call_at(wake_ns / 1e9, self._on_time)
            return
        value = _Timespec(wake_ns // 1_000_000_000, wake_ns % 1_000_000_000)
        spec = _Itimerspec(_Timespec(0, 0), value)
        self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None)

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)
            self._on_time()

    def _cancel_handle(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def close(self) -> None:
        """Safe to call twice."""
        self._cancel_handle()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
