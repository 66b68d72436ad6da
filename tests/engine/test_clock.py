"""Other hosts' clocks: the true offset lies within the uncertainty that is told, whatever the ways there and back."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from labkit.engine.clock import DRIFT, NUM_AT_ONCE, PERIOD_S, Clocks, Offset, clock_id
from labkit.engine.messages import Hello, Moved, Pong, Profiled, Sampled, SampleSpec, Step, StepStats
from labkit.measure.recorder import RING_DTYPE

SECOND = 10**9


class Elsewhere:
    """Another host: here − there is `offset`, which drifts; the ways there and back take what they take."""

    def __init__(self, seed: int, out_us: tuple[int, int], back_us: tuple[int, int], drift: float = 0.0) -> None:
        self.draw, self.out_us, self.back_us, self.drift = random.Random(seed), out_us, back_us, drift
        self.start_offset = self.draw.randrange(-(10**15), 10**15)
        self.now = 50 * SECOND

    def offset(self) -> int:
        return self.start_offset + int((self.now - 50 * SECOND) * self.drift)

    def read(self) -> int:
        return self.now - self.offset()

    def _pass(self, us: tuple[int, int]) -> None:
        """The least of a way, and now and then a long wait in a queue."""
        self.now += 1000 * (us[0] + self.draw.choice([0, 0, self.draw.randrange(us[1] - us[0] + 1)]))

    def ask(self, offset: Offset) -> None:
        sent = self.now
        self._pass(self.out_us)
        arrived = self.read()
        self.now += self.draw.randrange(20_000)
        left = self.read()
        self._pass(self.back_us)
        offset.round_trip(sent, arrived, left, self.now)


WAYS = [((40, 400), (40, 400)), ((30, 9000), (2000, 2500)), ((900, 950), (20, 5000))]


@pytest.mark.parametrize(("out_us", "back_us"), WAYS)
@pytest.mark.parametrize("drift", [0.0, 0.9 * DRIFT, -0.9 * DRIFT])
@pytest.mark.parametrize("seed", range(4))
def test_the_truth_lies_within_the_uncertainty_at_every_instant(
    out_us: tuple[int, int], back_us: tuple[int, int], drift: float, seed: int
) -> None:
    there, offset = Elsewhere(seed, out_us, back_us, drift), Offset()
    for trip in range(200):
        there.ask(offset)
        assert offset.uncertainty_ns is not None
        assert abs(offset.ns - there.offset()) <= offset.uncertainty_ns + 1
        there.now += int(PERIOD_S * SECOND) if trip >= NUM_AT_ONCE else 1000
    least_ns = 1000 * (out_us[0] + back_us[0]) / 2
    assert least_ns - 100 <= offset.best_round_trip_ns / 2 <= least_ns + 20_000
    a_few_periods = 10 * PERIOD_S * SECOND * DRIFT
    assert offset.uncertainty_ns <= least_ns + a_few_periods, "half of the quickest ways, and the drift since"


def test_the_quickest_ways_count_though_they_belong_to_two_round_trips() -> None:
    """True offset 1000; out 10 and back 500, then out 500 and back 10."""
    offset = Offset()
    offset.round_trip(0, 10 - 1000, 10 - 1000, 510)
    assert (offset.ns, offset.uncertainty_ns) == (1245, 255), "the truth is near one end"
    offset.round_trip(1000, 1500 - 1000, 1500 - 1000, 1510)
    assert (offset.ns, offset.uncertainty_ns, offset.best_round_trip_ns) == (1000, 10, 510)


def test_one_way_alone_is_no_estimate() -> None:
    offset = Offset()
    assert (offset.ns, offset.uncertainty_ns) == (0, None)
    offset.came(there_ns=5, here_ns=1005)
    assert (offset.ns, offset.uncertainty_ns) == (1000, None)


@pytest.mark.parametrize("jump_ns", [SECOND, -SECOND])
def test_a_clock_that_stood_still_is_learnt_anew(jump_ns: int) -> None:
    there, offset = Elsewhere(1, (50, 60), (50, 60)), Offset()
    there.ask(offset)
    there.start_offset += jump_ns
    there.ask(offset)
    there.ask(offset)
    assert offset.uncertainty_ns is not None and abs(offset.ns - there.offset()) <= offset.uncertainty_ns + 1


def _ring(*enters_ns: int) -> bytes:
    rows = np.zeros(len(enters_ns), RING_DTYPE)
    rows["enter_ns"] = enters_ns
    rows["exit_ns"] = rows["enter_ns"] + 5
    return rows.tobytes()


AHEAD = 3_600 * SECOND


def _joined(now_ns: int) -> Clocks:
    """Ranks 2 and 3 on a host an hour ahead."""
    clocks = Clocks()
    asked = [
        clocks.joined(Hello("", rank, 1, "far", False, clock_ns=now_ns + AHEAD, clock="far"), now_ns + 400_000)
        for rank in (2, 3)
    ]
    assert asked == [True, False], "one rank of a host is asked for its time"
    return clocks


def test_a_foreign_ranks_instants_are_put_on_this_clock_its_durations_kept() -> None:
    now = 10 * SECOND
    clocks = _joined(now)
    assert clocks.pong(2, Pong(now, now + AHEAD + 100_000, now + AHEAD + 100_000), now + 200_000) == 0.0
    (told,) = clocks.describe()
    assert (told.host, told.ranks, told.num_round_trips, told.best_round_trip_ns) == ("far", [2, 3], 1, 200_000)
    assert abs(told.offset_ns + AHEAD) <= told.uncertainty_ns <= 100_000 + 1
    there = now + AHEAD + SECOND
    message = StepStats(0, 7, 3, there + 1_000, there + 9_000, _ring(there + 2_000))
    clocks.translate(3, message, now + 2 * SECOND)
    rows = np.frombuffer(message.ring, RING_DTYPE)
    assert abs(message.end_ns - (now + SECOND + 9_000)) <= 100_000 + SECOND * DRIFT * 3
    assert message.end_ns - message.start_ns == 8_000
    assert rows["enter_ns"][0] - message.start_ns == 1_000 and rows["exit_ns"][0] - rows["enter_ns"][0] == 5
    moved = Moved(0, 1, 3, 5, there, there + 5)
    clocks.translate(3, moved, now + 2 * SECOND)
    assert abs(moved.start_ns - (now + SECOND)) <= 100_000 + SECOND * DRIFT * 3 and moved.end_ns - moved.start_ns == 5
    profile = Profiled(0, 3, 1, b"")
    clocks.translate(3, profile)
    assert profile.offset_ns == clocks.describe()[0].offset_ns


def test_steps_sharpen_the_estimate_both_ways() -> None:
    now = 10 * SECOND
    clocks = _joined(now)
    step = Step(0, 7, b"", b"", b"", b"", [SampleSpec(0)], 0)
    clocks.sent([2, 3], step, now + SECOND)
    there = now + SECOND + AHEAD
    clocks.translate(2, Sampled(0, 7, [1], None, there + 30_000, there + 900_000), now + SECOND + 920_000)
    (told,) = clocks.describe()
    assert told.uncertainty_ns == (30_000 + 20_000) // 2 and abs(told.offset_ns + AHEAD) <= told.uncertainty_ns


def test_round_trips_follow_each_other_at_first_and_then_come_once_a_period() -> None:
    clocks, now = _joined(10 * SECOND), 11 * SECOND
    waits = [clocks.pong(2, Pong(now, now + AHEAD, now + AHEAD), now) for _ in range(NUM_AT_ONCE + 2)]
    assert waits == [0.0] * (NUM_AT_ONCE - 1) + [PERIOD_S] * 3


def test_ranks_of_this_machine_are_left_alone_and_it_is_one_clock() -> None:
    clocks = Clocks()
    assert not clocks.joined(Hello("", 0, 1, "here", False, clock_ns=1, clock=clock_id()), time.monotonic_ns())
    message = Sampled(0, 0, [1], None, 5, 6)
    clocks.translate(0, message)
    assert (message.start_ns, message.end_ns) == (5, 6) and clocks.describe() == []
