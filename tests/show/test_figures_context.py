"""Figures of shared-out sequences: the medians and bars are the values given, and n stands beside them."""

from __future__ import annotations

import json
from typing import Any

from recorded_runs import make_run

from labkit.show import figures_context

RUNS = {"TP1": make_run("tp1"), "PCP2": make_run("pcp2", ttft_ms=60.0)}


def test_the_line_is_the_median_at_each_length_and_every_request_is_on_it() -> None:
    values = {"TP1": {64: [1.0, 2.0, 9.0], 256: [4.0]}, "PCP2": {64: [3.0], 256: [2.0]}}
    figure = figures_context.length_figure(RUNS, values)
    line, marks, other, _ = figure.data
    assert list(line.x) == [64, 256] and list(line.y) == [2.0, 4.0] and list(marks.y) == [1.0, 2.0, 9.0, 4.0]
    assert "n = 1 to 3" in line.name and "n = 1 at" in other.name
    assert (line.line.color, line.marker.symbol) != (other.line.color, other.marker.symbol)
    assert "measured here" in said(figure)


def test_the_bars_are_capacity_and_tpot_with_its_n() -> None:
    figure = figures_context.capacity_figure(RUNS, {"TP1": 1000, "PCP2": 2001})
    tokens, tpot = figure.data
    assert list(tokens.y) == [1000, 2001] and list(tokens.text) == ["1,000", "2,001"]
    assert list(tpot.y) == [10.0, 10.0] and all("n = 20" in text for text in tpot.text)
    assert "tokens" in said(figure)


def said(figure: Any) -> str:
    return json.dumps(figure.to_plotly_json()["layout"], default=str)
