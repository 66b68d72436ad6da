"""What crosses, from rows of a ring to marks of a plot, with sums that are done by hand."""

from __future__ import annotations

import pytest

from labkit.measure.crossing_meter import CrossingMeter, Crossings, tally
from labkit.measure.recorder import AXIS_CODES, DECODE, OP_CODES, PREFILL, Ring, group_id, merge
from tests.measure.make import MS

SECOND_NS = 1000 * MS


def _ring(*calls: tuple[str, str, int, int, int]) -> bytes:
    """calls: (axis, op, phase, seq, bytes)."""
    ring = Ring(64)
    for axis, op, phase, seq, num_bytes in calls:
        ring.put(group_id(axis, 0), seq, OP_CODES[op], AXIS_CODES[axis], phase, 0, num_bytes, 10 * seq, 10 * seq + 5)
    return ring.drain()


def test_a_collective_counts_on_each_rank_and_a_message_on_its_sender() -> None:
    first = _ring(
        ("tp", "all_reduce", PREFILL, 0, 800), ("tp", "all_reduce", PREFILL, 1, 400), ("pp", "send", DECODE, 2, 64),
        ("pp", "send", DECODE, 3, 0), ("tp", "barrier", DECODE, 4, 8),
    )  # fmt: skip
    second = _ring(
        ("tp", "all_reduce", PREFILL, 0, 800), ("tp", "all_reduce", PREFILL, 1, 400), ("pp", "recv", DECODE, 2, 64)
    )
    found = {(c.axis, c.op, c.phase): c for c in tally(merge([(0, 0, 100, first), (1, 0, 100, second)]).rows)}
    assert set(found) == {("tp", "all_reduce", "prefill"), ("pp", "send", "decode")}
    sums = found["tp", "all_reduce", "prefill"]
    assert (sums.num, sums.bytes, sums.ranks) == (4, 2400, [0, 1])
    sent = found["pp", "send", "decode"]
    assert (sent.num, sent.bytes, sent.ranks) == (1, 64, [0])


def test_nothing_crosses_on_one_rank() -> None:
    assert tally(merge([(0, 0, 100, b"")]).rows) == []


def test_a_mark_is_one_ranks_rate_and_the_mean_size() -> None:
    meter = CrossingMeter(seconds=5.0)
    meter.reset(SECOND_NS)
    for tenth in range(20):
        at_ns = SECOND_NS + tenth * 100 * MS
        meter.add([Crossings("tp", "all_reduce", "decode", 26, 26 * 1000, [0, 1])], at_ns, at_ns)
        meter.add([Crossings("tp", "gather", "decode", 2, 2 * 15_000, [0, 1])], at_ns, at_ns)
    (mark,) = meter.snapshot(3 * SECOND_NS)
    assert (mark["axis"], mark["phase"]) == ("tp", "decode")
    assert mark["per_s"] == pytest.approx(140) and mark["bytes"] == pytest.approx(2000)
    assert {op["op"]: round(op["per_s"]) for op in mark["ops"]} == {"all_reduce": 130, "gather": 10}


def test_marks_are_of_this_layout_and_of_the_last_seconds() -> None:
    meter = CrossingMeter(seconds=1.0)
    meter.add([Crossings("tp", "all_reduce", "decode", 10, 100, [0])], 0, 0)
    assert meter.snapshot(SECOND_NS // 2)
    assert meter.snapshot(3 * SECOND_NS) == []
    meter.add([Crossings("tp", "all_reduce", "decode", 10, 100, [0])], 3 * SECOND_NS, 3 * SECOND_NS)
    meter.reset(3 * SECOND_NS)
    assert meter.snapshot(3 * SECOND_NS + MS) == []
    late = [Crossings("tp", "all_reduce", "decode", 10, 100, [0])]
    meter.add(late, 3 * SECOND_NS + MS, begun_ns=2 * SECOND_NS)  # told after the switch, run before it
    assert meter.snapshot(3 * SECOND_NS + MS) == []
