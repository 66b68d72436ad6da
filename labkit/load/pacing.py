"""When the next request is due: three pacers with one face, for fixed schedules, endless ones and closed
loops.

`peek_ns` is the instant of the next request (None: nothing more, or nothing until something ends), `pop`
takes it. Only the endless pacer knows a rate that can change: the gaps are in mean gaps, so a new rate
stretches what is left of the gap under way and all that follow.
"""

from __future__ import annotations

from labkit.load.schedule import Schedule

_FIRST_PAUSE_NS = 50_000_000
_LONGEST_PAUSE_NS = 2_000_000_000


def check_rate(rate: float) -> None:
    """Raises ValueError when a rate is not above 0."""
    if not rate > 0:
        raise ValueError(f"the rate must be above 0 requests/s; got {rate}. Stop the run to send nothing.")


class FixedPacer:
    """Instants made ahead: start + at_s."""

    def __init__(self, schedule: Schedule, start_ns: int) -> None:
        self._due_ns = [start_ns + round(request.at_s * 1e9) for request in schedule.requests]
        self._next = 0

    def peek_ns(self, gap: float) -> int | None:
        return self._due_ns[self._next] if self._next < len(self._due_ns) else None

    def pop(self) -> int:
        self._next += 1
        return self._due_ns[self._next - 1]

    def remaining_ns(self) -> list[int]:
        """Instants of what was never sent."""
        return self._due_ns[self._next :]

    def ended(self, now_ns: int, failed: bool) -> None:
        """An open loop does not wait for answers."""


class EndlessPacer:
    """The next instant is the last one plus gap / rate."""

    def __init__(self, schedule: Schedule, start_ns: int) -> None:
        self._rate = schedule.rate
        self._last_ns = start_ns
        self._due_ns: int | None = None

    def peek_ns(self, gap: float) -> int | None:
        if self._due_ns is None:
            self._due_ns = self._last_ns + round(gap / self._rate * 1e9)
        return self._due_ns

    def pop(self) -> int:
        assert self._due_ns is not None
        self._last_ns, self._due_ns = self._due_ns, None
        return self._last_ns

    def set_rate(self, rate: float, now_ns: int) -> None:
        """From `now_ns` on."""
        if self._due_ns is not None and self._due_ns > now_ns:
            self._due_ns = now_ns + round((self._due_ns - now_ns) * self._rate / rate)
        self._rate = rate

    def remaining_ns(self) -> list[int]:
        return []

    def ended(self, now_ns: int, failed: bool) -> None:
        """An open loop does not wait for answers."""


class ClosedPacer:
    """`concurrency` slots: one that becomes free is due at once, or after a pause when its request failed."""

    def __init__(self, schedule: Schedule, start_ns: int) -> None:
        self._free_ns = [start_ns] * schedule.concurrency
        self._until_ns = start_ns + round(schedule.seconds * 1e9) if schedule.seconds else None
        self._failures = 0

    def peek_ns(self, gap: float) -> int | None:
        if not self._free_ns or (self._until_ns is not None and self._free_ns[0] >= self._until_ns):
            return None
        return self._free_ns[0]

    def pop(self) -> int:
        return self._free_ns.pop(0)

    def remaining_ns(self) -> list[int]:
        return []

    def ended(self, now_ns: int, failed: bool) -> None:
        """A slot is free again. A server that is gone is not asked in a tight loop."""
        self._failures = self._failures + 1 if failed else 0
        pause_ns = min(_LONGEST_PAUSE_NS, _FIRST_PAUSE_NS << min(self._failures, 8)) if failed else 0
        self._free_ns.append(now_ns + pause_ns)
        self._free_ns.sort()


Pacer = FixedPacer | EndlessPacer | ClosedPacer


def pacer_for(schedule: Schedule, start_ns: int) -> Pacer:
    if schedule.concurrency:
        return ClosedPacer(schedule, start_ns)
    return FixedPacer(schedule, start_ns) if schedule.endless is None else EndlessPacer(schedule, start_ns)
