"""What stages did, and what lay between them, against figures done by hand."""

from __future__ import annotations

import numpy as np
import pytest

from labkit.layout import Layout
from labkit.measure.metrics import Window
from labkit.measure.recorder import AXIS_CODES, DECODE, OP_CODES, Ring, group_id, merge
from labkit.measure.stages import InFlight, stage_figures
from tests.measure.make import MS, step

PP = group_id("pp", 0)


def _crossing(seq: int, sent: int, received: int, num_bytes: int) -> np.ndarray:
    rings = {}
    for op, enter, leave in (("send", sent, sent + 1), ("recv", received - 1, received)):
        rings[op] = Ring(4)
        rings[op].put(PP, seq, OP_CODES[op], AXIS_CODES["pp"], DECODE, -1, num_bytes, enter, leave)
    return merge([(0, 0, 1000, rings["send"].drain()), (1, 0, 1000, rings["recv"].drain())]).rows


def test_bytes_under_way_are_those_of_all_steps_that_have_not_arrived():
    in_flight = InFlight()
    assert in_flight.most_bytes(_crossing(0, 10, 100, 5)) == 5
    assert in_flight.most_bytes(_crossing(1, 50, 150, 7)) == 12, "the first still lay there"
    assert in_flight.most_bytes(_crossing(2, 120, 160, 11)) == 18, "the first had arrived"
    assert in_flight.most_bytes(_crossing(3, 200, 210, 3)) == 3


def test_a_step_that_crosses_nothing_has_nothing_under_way():
    assert InFlight().most_bytes(merge([(0, 0, 10, b"")]).rows) == 0


def test_the_slowest_stage_its_idle_share_and_the_bubbles():
    """Two stages of two ranks, two steps of 40 ms in a window of 100 ms."""
    steps = [
        step(0, 40, [10, 12, 20, 18], [2, 0, 0, 2], [1, 1, 5, 5]),
        step(40, 80, [10, 12, 22, 18], [2, 0, 0, 2], [1, 1, 5, 5], step_id=1),
    ]
    for at, one in enumerate(steps):
        one.idle_ns, one.in_flight_bytes = [0, 0, 13 * MS, 13 * MS], 100 * (at + 1)
    figures = stage_figures(steps, Window(0, 100 * MS), Layout.parse("pp2xtp2+split=3-5"))
    assert figures is not None
    first, last = figures["stages"]
    assert (first["ranks"], last["ranks"], last["num_layers"]) == ([0, 1], [2, 3], 5)
    assert first["busy_ms_per_step"] == pytest.approx(13) and last["busy_ms_per_step"] == pytest.approx(26)
    assert (figures["slowest_stage"], figures["activation_bytes_in_flight"]) == (1, 200)
    assert figures["slowest_over_mean"] == pytest.approx(26 / 19.5)
    assert first["idle"] == pytest.approx(1 - (22 + 22 + 2 + 2 + 2 + 2) / 200)
    assert (first["bubble"], last["bubble"]) == pytest.approx((0, 52 / 200))


def test_a_layout_without_stages_has_no_such_figures():
    assert stage_figures([step(0, 9, [5, 6], [1, 0], [2, 2])], Window(0, 10 * MS), Layout.parse("tp2")) is None
