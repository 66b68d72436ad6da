"""Whether a machine is quiet enough to be believed: which share of its cores other processes have.

A step's time on a core that somebody else uses half of the time is no property of the machine. What the hypervisor took
away (steal) counts as others' too.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

import psutil

TOO_BUSY = 0.25
"""Of all cores: with more than this in others' hands nothing is measured unless it is asked for anyway."""
NOISY = 0.06
"""With more than this while it was measured, the calibration says so."""
DRIFTING = 0.05
RUN_S = 10
_LOOK_S = 1.5


class Others:
    """From now on: the share of the cores that processes other than `pids` (and their children) have."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._began = time.monotonic()
        self._busy_s, self._own_s = _busy_s(), self._own()

    def share(self) -> float:
        """0 to 1 of all cores, since the beginning."""
        took_s = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        others_s = _busy_s() - self._busy_s - (self._own() - self._own_s)
        return min(1.0, max(0.0, others_s / took_s)) if took_s > 0 else 0.0

    def _own(self) -> float:
        total = 0.0
        for pid in set(self._pids):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                total += sum(_cpu_s(each) for each in [process, *process.children(recursive=True)])
        return total


def _busy_s() -> float:
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in ("user", "system", "irq", "softirq", "steal"))


def _cpu_s(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def look(seconds: float = _LOOK_S) -> float:
    """What others have of the cores now, over a moment in which this process sleeps."""
    meter = Others([os.getpid()])
    time.sleep(seconds)
    return meter.share()


def require_quiet(share: float, anyway: bool = False) -> None:
    """Raises ValueError with a sentence when steps measured now would not be this machine's."""
    if share <= TOO_BUSY or anyway:
        return
    cores = os.cpu_count() or 1
    raise ValueError(
        f"Other processes have {share * cores:.1f} of this machine's {cores} cores (load average "
        f"{os.getloadavg()[0]:.1f}); with more than {TOO_BUSY * cores:.2g} the steps measured would be theirs as much "
        f"as ours. End them and measure again, or add --anyway."
    )


def notes_of(share: float, num_ranks: int, drift: float = 0.0) -> tuple[str, ...]:
    """Sentences that belong to a calibration which was measured beside so much of others' work.

    drift: how far the mean step of one second lies from that of another, as a standard deviation.
    """
    cores, found = os.cpu_count() or 1, []
    if share > NOISY:
        found.append(
            f"While this was measured others had {share * cores:.2f} of {cores} cores: steps may be slower than alone."
        )
    if num_ranks >= cores:
        found.append(
            f"{num_ranks} ranks, the engine and the client share {cores} cores: a step's cost holds the answers' too."
        )
    if drift > DRIFTING:
        found.append(
            f"The same steps differ by {drift:.0%} from one second to another, whoever is at work: believe no "
            f"prediction of a run of {RUN_S} s to better than {2 * drift / RUN_S**0.5:.0%}."
        )
    return tuple(found)
