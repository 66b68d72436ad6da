"""Still figures: what they draw is what the rows say, and each says what it rests on."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from recorded_runs import MIB, make_run

from labkit.lab.compare import Comparison
from labkit.measure.metrics import Objective
from labkit.show import figures
from labkit.show.figures_memory import Holder, held_by_rank
from labkit.show.figures_memory_parts import memory_parts_figure
from labkit.show.figures_style import GREY, LINES

RUNS = {"TP1": make_run("tp1"), "TP2": make_run("tp2", ttft_ms=60.0)}


def recorded(layout: str) -> Any:
    return dataclasses.replace(make_run(layout), provenance="recorded")


def words(figure: Any) -> str:
    """Everything that can be read on it."""
    layout = figure.to_plotly_json()["layout"]
    names = [trace.name or "" for trace in figure.data]
    return json.dumps([layout["title"], layout.get("annotations"), names], default=str, ensure_ascii=False)


def traces(figure: Any, name: str) -> list[Any]:
    return [trace for trace in figure.data if trace.name and trace.name.startswith(name)]


ALL = {
    "run": lambda: figures.run_figure(RUNS["TP2"]),
    "comparison": lambda: figures.comparison_figure(
        Comparison({"tp1": [RUNS["TP1"]], "tp2": [RUNS["TP2"], make_run("tp2")]}, Objective(400, 50))
    ),
    "ladder": lambda: figures.ladder_figure(RUNS),
    "ecdf": lambda: figures.ecdf_figure(RUNS),
    "waterfall": lambda: figures.waterfall_figure(RUNS),
    "shares": lambda: figures.shares_figure(RUNS),
    "memory": lambda: figures.memory_figure(RUNS),
    "rate": lambda: figures.rate_figure([make_run("tp1", rate=1.0), make_run("tp1", rate=3.0)]),
    "bound": lambda: figures.bound_figure(RUNS, {"TP1": 9.0}, {"TP1": 5.0}, "ms", "TPOT", "bytes ÷ bandwidth"),
}


@pytest.mark.parametrize("name", ALL)
def test_every_figure_has_its_badge_and_can_be_sent(name: str):
    figure = ALL[name]()
    assert "measured here (solid)" in words(figure) and "2 cores" in words(figure)
    assert len(figure.data) > 0 and json.loads(figure.to_json())["layout"]["height"] < 1200


@pytest.mark.parametrize("name", ALL)
def test_no_figure_tells_anything_by_colour_alone(name: str):
    """Lines differ by marker or dash, parts of bars by hatch or by their own place."""
    figure = ALL[name]()
    lines = {
        (t.marker.symbol, t.line.dash, t.name) for t in figure.data if t.type == "scatter" and t.showlegend is not False
    }
    by_panel: dict[str, list[Any]] = {}
    for trace in figure.data:
        if trace.type == "bar":
            by_panel.setdefault(str(trace.legend), []).append((trace.marker.pattern.shape, trace.name))
    assert len({(symbol, dash) for symbol, dash, _ in lines}) == len(lines)
    for bars in by_panel.values():
        plain = [name for shape, name in bars if not shape]
        assert len(plain) <= 3, plain  # compute or weights, and the pale rest


def test_a_ladder_is_the_summary_and_few_samples_are_grey():
    figure = figures.ladder_figure({"TP1": RUNS["TP1"]})
    sure, few = traces(figure, "TP1 (n = 20)")[1], traces(figure, "TP1 (n = 20): too few")[0]
    assert list(sure.x) == ["p50"] and sure.y[0] == pytest.approx(109.5)
    assert list(few.x) == ["p50", "p90", "p95", "p99"] and few.line.color == GREY
    assert few.y[3] == pytest.approx(np.percentile(np.arange(100, 120), 99))


def test_a_run_whose_percentiles_are_all_grey_keeps_its_place_in_the_legend():
    figure = figures.ladder_figure({"TP1": make_run("tp1", 6)})
    legend = [trace for trace in figure.data if trace.showlegend is not False]
    assert [trace.name for trace in legend] == ["TP1 (n = 6)"] and list(legend[0].y) == [None]


def test_with_samples_enough_nothing_is_grey():
    figure = figures.ladder_figure({"TP1": make_run("tp1", 1000, rate=1000.0)})
    assert not [trace for trace in figure.data if "too few" in trace.name]


def test_measured_recorded_and_predicted_never_share_a_line():
    assert len(set(LINES.values())) == len(LINES) == 3
    figure = figures.ecdf_figure({"now": RUNS["TP1"], "then": recorded("tp2")})
    dashes = {trace.name.split(" ")[0]: trace.line.dash for trace in figure.data}
    assert dashes == {"now": "solid", "then": "dash"}
    assert "recorded (dashed)" in words(figure) and "2026-11-29" in words(figure)
    assert traces(figure, "then")[0].marker.symbol.endswith("-open")
    bars = figures.memory_figure({"now": RUNS["TP1"], "then": recorded("tp2")})
    assert set(bars.data[0].x[0]) == {"now", "then<br>recorded"}
    bound = ALL["bound"]()
    assert traces(bound, "bound")[0].line.dash == "dot" and "predicted (dotted)" in words(bound)


def test_a_comparison_of_a_recorded_run_says_so():
    found = Comparison({"tp1": [RUNS["TP1"]], "tp2": [recorded("tp2")]}, Objective(400, 50))
    assert "recorded (dashed)" in words(figures.comparison_figure(found))


def test_a_comparison_tells_its_differences_with_their_intervals():
    slower = make_run("tp2", ttft_ms=150.0)
    found = Comparison({"tp1": [RUNS["TP1"]], "tp2": [slower]}, Objective(400, 50))
    assert "TP2 − TP1: TTFT p50 +50.0 ms (95 %: +50.0 to +50.0)" in words(figures.comparison_figure(found))
    few = Comparison({"tp1": [make_run("tp1", 4)], "tp2": [make_run("tp2", 4)]}, Objective(400, 50))
    assert "too few pairs to tell (4)" in words(figures.comparison_figure(few))


def test_more_ranks_than_cores_is_said_where_it_is_so():
    assert "share 2 core(s)" in words(figures.ladder_figure([make_run("tp4")]))
    assert "share" not in words(figures.ladder_figure([make_run("tp2")]))
    assert "share" not in words(figures.ladder_figure([make_run("tp4", num_cores=4)]))


def test_an_ecdf_has_every_request():
    figure = figures.ecdf_figure({"TP1": RUNS["TP1"]})
    first = figure.data[0]
    assert len(first.x) == 20 and first.y[-1] == 100 and list(first.x) == sorted(first.x)


def test_the_waterfall_adds_up_to_the_mean_ttft():
    figure = figures.waterfall_figure({"TP1": RUNS["TP1"]})
    total = sum(trace.x[0] for trace in figure.data)
    assert total == pytest.approx(RUNS["TP1"].summary["ttft_ms"]["mean"], abs=0.1)


def test_memory_tells_what_is_split_from_what_is_copied():
    split, copied = (held_by_rank(make_run(name).summary) for name in ("tp2", "dp2xtp2"))
    whole = held_by_rank(make_run("tp1").summary)[0][Holder.ALONE]
    norms = split[0][Holder.SHARED]
    assert 0 < norms < 0.1 * MIB  # the norms are all that two tp ranks have in common
    assert 2 * split[0][Holder.ALONE] + norms == whole
    assert copied[3][Holder.ALONE] == 0 and copied[3][Holder.SHARED] == split[1][Holder.ALONE] + norms
    figure = figures.memory_figure({"TP1": make_run("tp1")})
    assert sum(trace.y[0] for trace in figure.data) == pytest.approx((whole + 21 * MIB) / MIB, rel=1e-3)
    assert "budget 96 MiB" in words(figure)


def test_shares_are_of_each_phase():
    figure = figures.shares_figure({"TP2": RUNS["TP2"]})
    assert [list(labels) for labels in figure.data[0].x] == [["prefill", "decode"], ["TP2", "TP2"]]
    assert {trace.name: trace.y[0] for trace in figure.data} == pytest.approx(
        {"compute": 60, "wait": 20, "transfer": 10, "between and around": 10}
    )


def test_a_rate_figure_leaves_out_what_has_no_rate():
    closed = make_run("tp2")
    closed.summary["rate"] = None
    figure = figures.rate_figure([make_run("tp1", rate=3.0), closed, make_run("tp1", rate=1.0)])
    assert [trace.name for trace in figure.data] == ["TP1 p50", "TP1 p99"]
    assert list(figure.data[0].x) == [1.0, 3.0] and figure.data[0].text[0] == "n = 20"


def test_a_run_without_a_summary_is_refused_with_a_sentence():
    unfinished = dataclasses.replace(make_run("tp1"), summary={}, status="running")
    with pytest.raises(ValueError, match="run-tp1 is running: it has no summary"):
        figures.run_figure(unfinished)


def test_run_and_comparison_plot_through_here():
    assert len(RUNS["TP1"].plot().data) == len(figures.run_figure(RUNS["TP1"]).data)


def test_importing_plotly_is_late_quick_and_leaves_no_trace():
    code = (
        "import sys; from labkit.show import figures; from labkit.show.figures_style import plotly;"
        "assert 'plotly' not in sys.modules; plotly(); import plotly.io as pio;"
        "print(pio.renderers.default, 'rfc3987_syntax' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["plotly_mimetype", "False", "False"], done.stdout + done.stderr


def test_tpot_s_parts_stand_beside_ttft_s():
    figure = figures.parts_figure({"TP1": RUNS["TP1"]})
    right = {trace.name: trace.x[0] for trace in figure.data if trace.xaxis == "x2"}
    assert sum(right.values()) == pytest.approx(RUNS["TP1"].summary["tpot_ms"]["mean"], rel=0.01)
    assert right["compute"] == pytest.approx(RUNS["TP1"].summary["tpot_parts_ms"]["compute"])


def test_two_layouts_part_by_part_say_what_was_not_halved():
    figure = memory_parts_figure(make_run("tp1"), make_run("tp2"))
    second = next(trace for trace in figure.data if trace.name == "TP2")
    said = dict(zip(second.hovertext, second.text, strict=True))
    assert said["mlp"] == "×0.50" and said["norm"] == "×1.00"
    counted = [trace for trace in figure.data if trace.name == "counted"]
    assert len(counted) == 2 and counted[0].line.dash == "dot"
    assert "Not measurable on this backend: activations" in words(figure)


def test_marks_of_a_logarithmic_axis_say_their_size() -> None:
    from labkit.show.figures_style import log_marks

    assert log_marks([90, 12_000])["ticktext"] == ["100", "1,000", "10,000"]
    assert log_marks([0.4, 3.7])["ticktext"] == ["0.5", "1", "2"]
    assert log_marks([31, 58])["ticktext"] == ["30", "40", "50", "60"]
    assert log_marks([float("inf"), 0.0]) == {}
