"""The plot of crossings: a mark for each axis and phase, at its own frequency and size."""

from __future__ import annotations

import dataclasses
from typing import Any

import pandas as pd
import pytest
from recorded_runs import make_run

from labkit.show.figures_crossings import crossings_figure, size_text


def run_with(layout: str, rows: list[tuple[str, str, str, int, int]]) -> Any:
    """(axis, operation, phase, bytes, how many); the run has a prefill step of 64 tokens and a decode step of 1."""
    run = make_run(layout)
    table = [
        {"epoch": 1, "step_id": 0, "rank": rank, "group_id": 0, "seq": seq, "op": op, "axis": axis, "phase": phase,
         "bytes": num_bytes}
        for axis, op, phase, num_bytes, count in rows for seq in range(count) for rank in (0, 1)
    ]  # fmt: skip
    run.collectives = pd.DataFrame(table)
    return run


TP = [("tp", "all_reduce", "prefill", 131_072, 17), ("tp", "all_reduce", "decode", 2048, 17)]


def marks(figure: Any) -> list[Any]:
    return [trace for trace in figure.data if trace.mode == "markers+text"]


def test_a_mark_stands_at_its_crossings_per_token_and_its_bytes():
    prefill, decode = marks(crossings_figure({"TP2": run_with("tp2", TP)}))
    assert (prefill.x[0], prefill.y[0]) == (pytest.approx(17 / 64), 131_072)
    assert (decode.x[0], decode.y[0]) == (17, 2048)
    assert prefill.marker.symbol != decode.marker.symbol and prefill.marker.color == decode.marker.color
    assert prefill.text == decode.text == ("TP",)


def test_per_second_it_is_the_time_in_which_a_step_was_under_way():
    _, decode = marks(crossings_figure({"TP2": run_with("tp2", TP)}, per="second"))
    assert decode.x[0] == pytest.approx(17 / 0.010)


def test_on_a_grey_line_the_product_is_the_same_and_is_its_name():
    figure = crossings_figure({"TP2": run_with("tp2", TP)})
    lines = [trace for trace in figure.data if trace.mode == "lines+text"]
    assert len(lines) >= 2
    for line in lines:
        product = line.x[0] * line.y[0]
        assert line.x[1] * line.y[1] == pytest.approx(product)
        assert line.text[1] == f"{size_text(product)} per token"


def test_an_axis_without_a_crossing_is_named_and_one_that_is_not_used_is_not():
    figure = crossings_figure([run_with("dp2xtp2", TP)])
    footer = " ".join(note.text for note in figure.layout.annotations)
    assert "DP has no mark" in footer and "PP" not in footer
    assert "measured here" in figure.layout.title.subtitle.text


def test_several_runs_name_their_marks_and_a_recorded_one_is_open():
    recorded = dataclasses.replace(run_with("tp2", TP), provenance="recorded")
    recorded.collectives = run_with("tp2", TP).collectives
    found = marks(crossings_figure({"now": run_with("tp2", TP), "then": recorded}))
    assert [mark.text[0] for mark in found] == ["TP now", "TP now", "TP then", "TP then"]
    assert [mark.marker.symbol for mark in found] == ["square", "circle", "square-open", "circle-open"]


def test_one_rank_has_nothing_to_draw():
    with pytest.raises(ValueError, match="No crossing was recorded"):
        crossings_figure([run_with("tp1", [("tp", "barrier", "decode", 0, 1)])])


@pytest.mark.parametrize(("size", "text"), [(0.5, "0.5 B"), (999, "999 B"), (1e3, "1 kB"), (2e9, "2 GB")])
def test_sizes_are_decimal(size: float, text: str):
    assert size_text(size) == text
