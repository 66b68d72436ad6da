"""How busy a machine was with other things while something was measured: all processes less those that measured."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

import psutil

TOO_BUSY_CORES = 0.25
"""Of cores: from here on figures of a fabric are those of a busy machine."""


class Neighbours:
    """Begins to count when made. pids: of the processes that measure (this one counts as one of them)."""

    def __init__(self, pids: Iterable[int] = ()) -> None:
        self._processes = []
        for pid in (None, *pids):
            with contextlib.suppress(psutil.Error):  # one that has gone takes nothing
                self._processes.append(psutil.Process(pid))
        self._began = (time.monotonic(), _all_s(), self._own_s())

    def busy_cores(self) -> float:
        """Cores that others kept busy since the beginning, on average; 0 where the counters say less than nothing."""
        at, all_s, own_s = self._began
        passed_s = max(time.monotonic() - at, 1e-9)
        return max(0.0, (_all_s() - all_s - (self._own_s() - own_s)) / passed_s)

    def _own_s(self) -> float:
        total = 0.0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total


def _all_s() -> float:
    """CPU seconds of all cores that were not idle; what a hypervisor took for other machines is others' too."""
    times = psutil.cpu_times()
    guest = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # Linux counts them in user and nice, too
    return sum(times) - guest - times.idle - getattr(times, "iowait", 0.0)
