"""Ranks that answer nothing: a process that hangs closes no socket, so only the clock can tell.

Where peers wait inside a collective, the collective's own deadline comes first and names who did not come;
this is for a rank that hangs alone. One timer at most, and none while nothing is on its way: an idle engine
stays idle.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

STEP_TIMEOUT_S = 75.0
"""More than the 60 s of a collective, which knows better who is missing."""
SWITCH_TIMEOUT_S = 600.0
"""For weights read from a slow disk."""


class Awaited(Protocol):
    """A step, or a handoff, on its way."""

    @property
    def start_ns(self) -> int: ...

    @property
    def silent_ranks(self) -> list[int]: ...


class Watchdog:
    """flights: what is on its way, oldest first. on_hung(ranks): those that the oldest still waits for."""

    def __init__(
        self, flights: Mapping[int, Awaited], timeout_s: float, on_hung: Callable[[Sequence[int]], None]
    ) -> None:
        if timeout_s <= 0:
            raise ValueError(f"the step timeout is {timeout_s:g} s; it must be more than 0.")
        self._flights, self._on_hung = flights, on_hung
        self.timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """A step was sent."""
        if self._timer is None:
            self._look_in(self.timeout_s)

    def _look_in(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        oldest = next(iter(self._flights.values()), None)
        if oldest is None:
            return
        left_s = self.timeout_s - (time.monotonic_ns() - oldest.start_ns) / 1e9
        if left_s > 0:
            self._look_in(left_s)
        else:
            self._on_hung(oldest.silent_ranks)
