"""The figures of experts: shares and rows as the steps told them, the busiest marked, the average beside it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import msgspec
import pytest
from recorded_runs import make_run

from labkit.lab.run import Run
from labkit.show import figures_experts as drawn

EVEN, SKEWED = [10] * 8, [40, 20, 10, 2, 4, 2, 1, 1]


def moe_run(tokens: list[int], rows: list[int], waits_ms: list[float]) -> Run:
    """Two steps of two ranks, alike."""
    run = make_run("tp2")
    told = {
        "expert_tokens": tokens,
        "expert_rows": rows,
        "expert_sent_bytes": [0, 0],
        "expert_ns": [1, 1],
        "expert_wait_ns": [round(ms * 1e6) for ms in waits_ms],
    }
    run.step_records = [msgspec.structs.replace(step, **told) for step in run.step_records]
    return run


RUNS = {"chat": moe_run(EVEN, [40, 40], [1.0, 1.0]), "skewed": moe_run(SKEWED, [72, 8], [0.5, 6.0])}


def words(figure: Any) -> str:
    layout = figure.to_plotly_json()["layout"]
    return json.dumps([layout["title"], layout.get("annotations")], default=str, ensure_ascii=False)


def hatched(trace: Any) -> list[int]:
    return [at for at, shape in enumerate(trace.marker.pattern.shape) if shape]


def test_each_expert_has_its_share_and_the_busiest_is_marked() -> None:
    figure = drawn.expert_load_figure(RUNS)
    chat, skewed = figure.data
    assert list(chat.y) == [12.5] * 8 and list(skewed.y) == [50, 25, 12.5, 2.5, 5, 2.5, 1.25, 1.25]
    assert hatched(skewed) == [0] and skewed.text[0] == "4.0×" and not any(skewed.text[1:])
    assert list(skewed.customdata) == [2 * tokens for tokens in SKEWED]
    averages = [shape for shape in figure.layout.shapes if shape.y0 == shape.y1 == 12.5]
    assert len(averages) == 2 and "average" in words(figure)
    assert "measured here (solid)" in words(figure) and json.loads(figure.to_json())["layout"]["height"] < 600


def test_ranks_show_rows_waits_and_the_mean_that_hides_them() -> None:
    figure = drawn.expert_ranks_figure(RUNS)
    rows, mean_rows, waits, mean_waits = figure.data
    assert [list(labels) for labels in rows.x] == [["chat", "chat", "skewed", "skewed"], ["r0", "r1", "r0", "r1"]]
    assert list(rows.y) == [80, 80, 144, 16] and list(mean_rows.y) == [80, 80, 80, 80]
    assert hatched(rows)[-1] == 2 and hatched(waits) == hatched(rows), "whoever has most rows, in both panels"
    assert list(waits.y) == pytest.approx([2, 2, 1, 12]) and mean_waits.y[2] == pytest.approx(6.5)
    assert "Waits are the machine's" in words(figure)


def test_a_recorded_run_says_so() -> None:
    then = {"then": dataclasses.replace(RUNS["skewed"], provenance="recorded")}
    figure = drawn.expert_load_figure(then)
    assert "recorded (dashed)" in words(figure) and "then, recorded" in words(figure)
    assert set(drawn.expert_ranks_figure(then).data[0].x[0]) == {"then<br>recorded"}


def test_a_dense_model_has_no_such_figure() -> None:
    with pytest.raises(ValueError, match="tells of experts"):
        drawn.expert_ranks_figure({"dense": make_run("tp2")})
