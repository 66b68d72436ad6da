"""The last steps' picture, from rows made by hand: every stretch in its place, and who was last."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from labkit.measure.recorder import AXIS_CODES, MERGED_DTYPE, OP_CODES
from labkit.measure.timeline import KINDS, MAX_STEPS, TimelineTeller, timeline
from tests.measure.make import MS, step


def row(rank: int, enter_ms: float, exit_ms: float, wait_ms: float, **fields: Any) -> np.ndarray:
    made = np.zeros(1, MERGED_DTYPE)
    made["epoch"], made["rank"], made["group_id"] = 1, rank, 7
    made["enter_ns"], made["exit_ns"], made["wait_ns"] = enter_ms * MS, exit_ms * MS, wait_ms * MS
    for name, value in fields.items():
        made[name] = value
    return made


def rows_of(*rows: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(0, MERGED_DTYPE), *rows])


def two_ranks(step_id: int = 0, at_ms: float = 100.0) -> tuple[Any, list[np.ndarray]]:
    """A step of 10 ms with one sum: rank 0 enters after 2 ms, rank 1 after 5, both leave after 6."""
    made = step(at_ms, at_ms + 10, [6, 9], [3, 0], [1, 1], step_id=step_id)
    calls = [row(0, at_ms + 2, at_ms + 6, 3, step_id=step_id, seq=step_id),
             row(1, at_ms + 5, at_ms + 6, 0, step_id=step_id, seq=step_id)]  # fmt: skip
    return made, calls


def named(bars: list[list[float]]) -> list[tuple[float, float, str]]:
    return [(start, length, KINDS[int(kind)]) for start, length, kind in bars]


def test_a_step_is_cut_where_its_ranks_met() -> None:
    made, calls = two_ranks()
    picture = timeline([made], rows_of(*calls))
    assert picture is not None and picture["span_ms"] == 10
    first, second = picture["ranks"]
    assert named(first["bars"]) == [(0, 2, "compute"), (2, 3, "wait"), (5, 1, "transfer"), (6, 4, "compute")]
    assert named(second["bars"]) == [(0, 5, "compute"), (5, 1, "transfer"), (6, 4, "compute")]
    assert [(each["last"], each["of"]) for each in picture["ranks"]] == [(0, 1), (1, 1)]


def test_a_receive_s_wait_is_a_bubble_and_counts_for_nobody_s_lateness() -> None:
    made = step(0, 10, [10, 3], [0, 0], [0, 1])
    received = row(1, 0, 7, 6, op=OP_CODES["recv"], axis=AXIS_CODES["pp"])
    picture = timeline([made], rows_of(received))
    assert picture is not None
    assert named(picture["ranks"][1]["bars"]) == [(0, 6, "idle"), (6, 1, "transfer"), (7, 3, "compute")]
    assert picture["ranks"][1]["of"] == 0


def test_ranks_that_share_nothing_only_compute() -> None:
    picture = timeline([step(0, 4, [4], [0], [0])], rows_of())
    assert picture is not None and named(picture["ranks"][0]["bars"]) == [(0, 4, "compute")]
    assert timeline([], rows_of()) is None


def test_only_the_newest_steps_and_no_more_bars_than_a_frame_may_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [two_ranks(i, 100 + 20 * i) for i in range(12)]
    steps, rows = [each[0] for each in made], rows_of(*(row for each in made for row in each[1]))
    picture = timeline(steps, rows)
    assert picture is not None and [each["step_id"] for each in picture["steps"]] == list(range(12 - MAX_STEPS, 12))
    monkeypatch.setattr("labkit.measure.timeline.MAX_BARS", 12)
    fewer = timeline(steps, rows)
    assert fewer is not None and [each["step_id"] for each in fewer["steps"]] == [10, 11]


def test_it_is_told_at_most_so_often_and_never_of_two_layouts_together() -> None:
    teller = TimelineTeller(period_s=0.5)
    first, calls = two_ranks(0)
    teller.add_rows(rows_of(*calls))
    assert teller.add_steps([first], 10**9) is not None
    second, calls = two_ranks(1, 120)
    second.epoch = 2
    teller.add_rows(rows_of(*calls))
    assert teller.add_steps([second], 10**9 + 1) is None
    told = teller.add_steps([], 2 * 10**9)
    assert told is not None and [each["step_id"] for each in told["steps"]] == [1]
