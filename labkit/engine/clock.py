"""Whose clock an instant was read from, how far two of them are apart, and how surely that is known.

CLOCK_MONOTONIC is common to everything on one host (namespaces of the network make no difference, those of time do).
Another host's clock is told from round trips over the control link, as NTP does: what left here cannot have arrived
there before it left, which bounds the offset from below; what came back bounds it from above. The quickest way out and
the quickest way back give the narrowest pair, the estimate is its middle, and the truth lies within half its width,
however unlike the two ways are. Bounds widen by what two clocks may drift, so round trips are repeated; steps, which go
the same ways, sharpen them too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from labkit.engine.messages import EngineMessage, Hello, Moved, Pong, Profiled, RankMessage, Sampled, Step, StepStats
from labkit.measure.recorder import RING_DTYPE
from labkit.measure.records import ClockRecord

DRIFT = 50e-6
"""Seconds a second that two hosts' clocks may drift apart."""
NUM_AT_ONCE, PERIOD_S = 8, 1.0
"""Round trips when a host joins, one after another; then one a period, in which clocks drift by 50 µs at most."""
_MAX_SENT = 256
"""Steps under way of which is known when they left."""


def clock_id() -> str:
    """Equal in two processes exactly when their monotonic instants can be compared."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts = [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/time")]
    return " ".join(parts)


class _Bound:
    """The sharpest seen so far, `limit_ns` as it was at `at_ns`; it gives way (sign +1: upwards) by DRIFT."""

    def __init__(self, sign: int) -> None:
        self._sign = sign
        self.limit_ns: int | None = None
        self._at_ns = 0

    def at(self, now_ns: int) -> int | None:
        if self.limit_ns is None:
            return None
        return self.limit_ns + self._sign * int(max(0, now_ns - self._at_ns) * DRIFT)

    def learn(self, limit_ns: int, now_ns: int) -> None:
        known = self.at(now_ns)
        if known is None or self._sign * (limit_ns - known) < 0:
            self.limit_ns, self._at_ns = limit_ns, now_ns


class Offset:
    """Of one foreign clock: add `ns` to an instant read there. The truth is at most `uncertainty_ns` from it."""

    def __init__(self) -> None:
        self.num_round_trips, self.best_round_trip_ns = 0, 0
        self._least, self._most = _Bound(-1), _Bound(+1)
        self._now_ns = 0

    @property
    def ns(self) -> int:
        """0 as long as nothing has come."""
        known = [limit for bound in (self._least, self._most) if (limit := bound.at(self._now_ns)) is not None]
        return sum(known) // len(known) if known else 0

    @property
    def uncertainty_ns(self) -> int | None:
        """Now; None as long as only one way was gone."""
        least, most = self._least.at(self._now_ns), self._most.at(self._now_ns)
        return None if least is None or most is None else (most - least + 1) // 2

    def went(self, here_ns: int, there_ns: int, now_ns: int) -> None:
        """What left here had arrived there."""
        self._least.learn(here_ns - there_ns, now_ns)
        self._now_ns = now_ns
        self._agree(self._most)

    def came(self, there_ns: int, here_ns: int) -> None:
        """What left there has arrived here."""
        self._most.learn(here_ns - there_ns, here_ns)
        self._now_ns = here_ns
        self._agree(self._least)

    def round_trip(self, sent_ns: int, arrived_there_ns: int, left_there_ns: int, back_ns: int) -> None:
        taken_ns = (back_ns - sent_ns) - (left_there_ns - arrived_there_ns)
        self.best_round_trip_ns = min(taken_ns, self.best_round_trip_ns) if self.num_round_trips else taken_ns
        self.num_round_trips += 1
        self.went(sent_ns, arrived_there_ns, back_ns)
        self.came(left_there_ns, back_ns)

    def _agree(self, older: _Bound) -> None:
        """A clock that was stopped (a host asleep) contradicts what was seen before: that is forgotten."""
        least, most = self._least.at(self._now_ns), self._most.at(self._now_ns)
        if least is not None and most is not None and least > most:
            older.limit_ns = None


class Clocks:
    """The clocks of a pool's ranks, beside this process's own."""

    def __init__(self) -> None:
        self._mine = clock_id()
        self._of_rank: dict[int, Offset] = {}
        self._by_id: dict[str, Offset] = {}
        self._hosts: dict[str, str] = {}
        self._ranks: dict[str, list[int]] = {}
        self._sent_ns: dict[int, int] = {}

    def joined(self, hello: Hello, now_ns: int) -> bool:
        """Whether a clock has come with it that is to be asked for the time, by round trips to this rank."""
        if not hello.clock or hello.clock == self._mine:
            return False
        is_new = hello.clock not in self._by_id
        offset = self._of_rank[hello.rank] = self._by_id.setdefault(hello.clock, Offset())
        self._hosts[hello.clock] = hello.host
        self._ranks.setdefault(hello.clock, []).append(hello.rank)
        offset.came(hello.clock_ns, now_ns)
        return is_new

    def pong(self, rank: int, message: Pong, now_ns: int) -> float:
        """A round trip is over; how long to wait with the next, in seconds."""
        offset = self._of_rank[rank]
        offset.round_trip(message.sent_ns, message.arrived_ns, message.left_ns, now_ns)
        return PERIOD_S if offset.num_round_trips >= NUM_AT_ONCE else 0.0

    def sent(self, ranks: Iterable[int], message: EngineMessage, now_ns: int) -> None:
        """A step leaves: when its ranks tell that they have it, that bounds their clock."""
        if self._of_rank and isinstance(message, Step):
            self._sent_ns.setdefault(message.step_id, now_ns)
            if len(self._sent_ns) > _MAX_SENT:
                del self._sent_ns[next(iter(self._sent_ns))]

    def translate(self, rank: int, message: RankMessage, now_ns: int | None = None) -> None:
        """Put a message's instants on this process's clock, in place."""
        offset = self._of_rank.get(rank)
        if offset is None:
            return
        if isinstance(message, Profiled):
            message.offset_ns = offset.ns
        if not isinstance(message, Sampled | StepStats | Moved):
            return
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        if not isinstance(message, Moved) and message.step_id in self._sent_ns:
            offset.went(self._sent_ns[message.step_id], message.start_ns, now_ns)
        offset.came(message.end_ns, now_ns)
        message.start_ns += offset.ns
        message.end_ns += offset.ns
        if isinstance(message, StepStats):
            message.ring = _shifted(message.ring, offset.ns)

    def describe(self) -> list[ClockRecord]:
        """Each clock that is not this process's own; none: all instants are of one."""
        return [
            ClockRecord(
                self._hosts[name], sorted(self._ranks[name]), offset.ns, offset.uncertainty_ns,
                offset.best_round_trip_ns, offset.num_round_trips,
            )
            for name, offset in self._by_id.items()
        ]  # fmt: skip


def _shifted(ring: bytes, offset_ns: int) -> bytes:
    rows = np.frombuffer(ring, RING_DTYPE).copy()
    rows["enter_ns"] += offset_ns
    rows["exit_ns"] += offset_ns
    return rows.tobytes()
