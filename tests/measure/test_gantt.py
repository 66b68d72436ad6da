"""The picture of stages and the sums of experts, from step records made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from labkit.measure.experts import ExpertMeter
from labkit.measure.gantt import MAX_BARS, StageGantt
from labkit.measure.records import StepRecord
from tests.measure.make import MS, step


def _staged(step_id: int, start_ms: float, layout: str = "pp2xtp2", **fields: Any) -> StepRecord:
    """Stage 0 works for 20 ms; stage 1 begins with it, idles for 22 and works for 8, of which 2 in collectives."""
    made = step(start_ms, start_ms + 30, [20, 18, 6, 5], [0, 0, 1, 1], [1, 1, 1, 1], step_id=step_id)
    made.layout, made.idle_ns = layout, [0, 0, 22 * MS, 22 * MS]
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_a_row_a_stage_with_the_rank_that_works_longest() -> None:
    gantt = StageGantt()
    gantt.add([_staged(0, 100), _staged(1, 130)])
    picture = gantt.snapshot()
    assert picture is not None and picture["span_ms"] == pytest.approx(60)
    first, last = picture["rows"]
    assert (first["stage"], first["ranks"], last["stage"], last["ranks"]) == (0, [0, 1], 1, [2, 3])
    assert first["bars"] == [[0, 0, 20, 1], [30, 0, 20, 1]]
    assert last["bars"] == [[0, 22, 6, 2], [30, 22, 6, 2]]


def test_only_the_last_second_and_no_more_bars_than_a_frame_may_carry() -> None:
    gantt = StageGantt()
    gantt.add([_staged(i, 30 * i) for i in range(100)])
    picture = gantt.snapshot()
    assert picture is not None
    assert [len(row["bars"]) for row in picture["rows"]] == [33, 33], "a step of 30 ms fits 33 times into a second"
    gantt.add([_staged(i, 3000 + i) for i in range(400)])
    picture = gantt.snapshot()
    assert picture is not None and sum(len(row["bars"]) for row in picture["rows"]) == MAX_BARS


def test_without_stages_there_is_no_picture() -> None:
    gantt = StageGantt()
    gantt.add([_staged(0, 0, layout="tp4")])
    assert gantt.snapshot() is None
    gantt.add([_staged(0, 0)])
    gantt.reset(10 * MS)
    gantt.add([_staged(1, 5)])
    assert gantt.snapshot() is None, "a step that began before the switch belongs to the layout before"


def test_ranks_of_a_second_pool_keep_their_global_numbers() -> None:
    gantt = StageGantt()
    gantt.add([_staged(0, 0, replica=1, ranks=[4, 5, 6, 7])])
    picture = gantt.snapshot()
    assert picture is not None and [row["ranks"] for row in picture["rows"]] == [[4, 5], [6, 7]]


# ---- experts


def _routed(start_ms: float, tokens: list[int]) -> StepRecord:
    made = step(start_ms, start_ms + 10, [8, 8], [1, 1], [1, 1])
    made.expert_tokens, made.expert_rows, made.expert_sent_bytes = tokens, [30, 10], [4096, 2048]
    made.expert_ns, made.expert_wait_ns, made.num_dropped = [5 * MS, 2 * MS], [0, 3 * MS], 2
    return made


def test_what_experts_were_asked_lately() -> None:
    meter = ExpertMeter(seconds=1.0)
    assert meter.snapshot(0) is None
    meter.add([_routed(0, [1, 2, 3]), _routed(500, [10, 0, 0]), step(505, 510, [1, 1], [0, 0], [0, 0])])
    load = meter.snapshot(600 * MS)
    assert load is not None and load["tokens"] == [11, 2, 3] and load["num_dropped"] == 4
    assert load["ranks"][0] == {"rank": 0, "rows": 60, "sent_bytes": 8192, "compute_ms": 10.0, "wait_ms": 0.0}
    assert load["ranks"][1]["wait_ms"] == 6.0
    load = meter.snapshot(1300 * MS)
    assert load is not None and load["tokens"] == [10, 0, 0]


def test_another_layout_begins_anew() -> None:
    meter = ExpertMeter()
    meter.add([_routed(0, [1, 2, 3])])
    meter.reset(100 * MS)
    meter.add([_routed(50, [9, 9, 9])])
    assert meter.snapshot(200 * MS) is None, "a step that began before the switch belongs to the layout before"
