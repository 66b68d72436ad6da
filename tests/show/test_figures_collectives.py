"""The curve of a collective: measured points, the fitted line, and a model's messages where they stand on it."""

from __future__ import annotations

import copy

import pytest

from labkit.show.figures_collectives import curve_figure

FOUND = {
    "rows": [
        {"op": "all_reduce", "bytes": size, "ranks": 2, "in_place": place, "time_us": 10 + size / 1000, "group": 0,
         "fabric": "shm"}
        for size in (1024, 65536) for place in (False, True)
    ],
    "fits": [{"op": "all_reduce", "in_place": True, "alpha_us": 10.0, "gb_per_s": 1.0}],
    "marks": [
        {"phase": "decode 1", "op": "all_reduce", "bytes": 2048, "count": 17, "time_us": 12.0, "step_us": 204.0},
        {"phase": "prefill 512", "op": "all_reduce", "bytes": 2**20, "count": 17, "time_us": None, "step_us": None},
        {"phase": "decode 1", "op": "gather", "bytes": 16384, "count": 1, "time_us": None, "step_us": None},
    ],
    "device": "cpu", "rounds": 20, "checked": True,
}  # fmt: skip


def test_points_line_and_marks():
    figure = curve_figure(FOUND)
    by_name = {trace.name: trace for trace in figure.data}
    assert list(by_name["in place"].y) == pytest.approx([11.024, 75.536])
    assert list(by_name["α + bytes ÷ β"].y) == pytest.approx([11.024, 75.536])
    assert by_name["α + bytes ÷ β"].line.dash == "dot" and by_name["in place"].line.dash == "solid"
    assert [shape.x0 for shape in figure.layout.shapes] == [2048, 2**20], "only messages of this operation"
    text = " ".join(annotation.text for annotation in figure.layout.annotations)
    assert "17 × 2 KiB in a step, by the line 12 µs each and 0.20 ms together" in text
    badge = figure.layout.title.subtitle.text
    assert "measured here" in badge and "2 ranks, cpu, shm" in badge and "predicted (dotted)" in badge


def test_what_was_not_measured_is_refused():
    with pytest.raises(ValueError, match="all_gather was not measured; there are all_reduce"):
        curve_figure(FOUND, "all_gather")


def test_a_flat_curve_has_no_bandwidth_to_draw():
    flat = copy.deepcopy(FOUND)
    flat["fits"][0]["gb_per_s"] = None
    line = next(trace for trace in curve_figure(flat).data if trace.name == "α + bytes ÷ β")
    assert list(line.y) == [10.0, 10.0]
