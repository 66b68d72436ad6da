"""Still figures of runs and comparisons, for notebooks and reports: plotly figures that say what they rest on.

Every function takes runs (a list, or a dict of label → Run) and returns one `go.Figure`. The live page does not
use any of this. What the line styles and the grey mean stands in `figures_style` and `figures_panels`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.layout import read_layout
from labkit.measure.breakdown import step_share, summarize_tpot, summarize_ttft
from labkit.measure.metrics import Window, counted
from labkit.show import figures_panels as panels
from labkit.show.figures_style import (
    COLOURS,
    GREY,
    HEIGHT,
    LINES,
    MARKERS,
    Series,
    compose,
    layout_name,
    plotly,
    series_of,
)

if TYPE_CHECKING:
    from labkit.lab.compare import Comparison
    from labkit.lab.run import Run

Runs = dict[str, "Run"] | Sequence["Run"]
_GREY_NOTE = "Grey: fewer than ten samples lie beyond that percentile; it is the fate of single requests."
_NO_PERCENTILES = ("samples",)
"""The warning that has no place under a figure without percentiles."""
_LEGEND_COLUMNS = 5
"""Entries in a row of the legend at the width of a notebook."""


def run_figure(run: Run) -> Any:
    """One run: its percentiles, its TTFT by part, its step time, its memory. `Run.plot()` calls this."""
    (one,) = series_of([run])
    what = f"{run.summary.get('workload')} at {run.summary.get('rate') or 0:.3g} requests/s"
    if run.summary.get("concurrency"):
        what = f"{run.summary['workload']}, {run.summary['concurrency']} in flight"
    steady = (run.summary.get("steady") or {}).get("sentence")  # runs that were stored long ago have none
    return _overview([one], f"{one.label}: {what}", run.summary["goodput"]["objective"], [steady] if steady else [])


def comparison_figure(comparison: Comparison) -> Any:
    """Layouts side by side, their rounds pooled. `Comparison.plot()` calls this."""
    series = []
    for index, (slug, runs) in enumerate(comparison.runs.items()):
        if runs:
            summary = {**runs[-1].summary, **comparison.summaries[slug], **_pooled(runs)}
            series.append(Series(str(read_layout(slug)), index, summary, tuple(runs)))
    names = " against ".join(each.label for each in series)
    title = f"{names}: the same requests"
    return _overview(series, title, comparison.objective.to_dict(), _differences(comparison))


def _differences(comparison: Comparison) -> list[str]:
    """The medians' differences to the first layout, each with its interval: what the lines alone do not tell."""
    found: dict[str, None] = {}
    for entry in comparison.differences:
        if entry["percentile"] != 50 or entry["figure"] == "e2el_ms":
            continue
        pair = f"{read_layout(entry['layout'])} − {read_layout(entry['against'])}"
        if entry["difference_ms"] is None:
            found[f"{pair}: too few pairs to tell ({entry['n']})."] = None
            continue
        low, high = entry["interval_ms"]
        unsure = ", so it cannot be told" if entry["verdict"] == "cannot tell" else ""
        what = f"{pair}: {panels.NAMES[entry['figure']]} p50"
        found[f"{what} {entry['difference_ms']:+.1f} ms (95 %: {low:+.1f} to {high:+.1f}{unsure})."] = None
    return [text.replace("-", "−") for text in found]


def _pooled(runs: Sequence[Run]) -> dict[str, Any]:
    """Parts of TTFT over the requests of all rounds; shares of step time over all their steps."""
    rows = [record for run in runs for record in counted(run.records, run.window)]
    steps = [step for run in runs for step in run.step_records]
    window = Window(min(run.window.start_ns for run in runs), max(run.window.end_ns for run in runs))
    return {**summarize_ttft(rows), **summarize_tpot(rows), "step_share": step_share(steps, window)}


def _overview(series: Sequence[Series], title: str, objective: Mapping[str, Any], notes: Sequence[str] = ()) -> Any:
    plotly()
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=3,
        cols=2,
        subplot_titles=("TTFT", "TPOT", "TTFT by part", "TPOT by part", "Step time by phase", "Memory per rank"),
        vertical_spacing=0.15,
        horizontal_spacing=0.1,
        row_heights=[0.36, 0.26, 0.38],
    )
    _ladders(figure, series, objective)
    panels.add_waterfall(figure, series, {"row": 2, "col": 1}, "legend2")
    panels.add_waterfall(figure, series, {"row": 2, "col": 2}, "legend2", "tpot")
    panels.add_shares(figure, series, {"row": 3, "col": 1}, "legend3")
    panels.add_memory(figure, series, {"row": 3, "col": 2}, "legend4")
    level = {"orientation": "h", "xanchor": "left", "yanchor": "top", "font": {"size": 11}}
    figure.update_layout(
        barmode="relative",
        legend2={**level, "x": 0, "y": 0.365},
        legend3={**level, "x": 0, "y": -0.06, "traceorder": "normal"},
        legend4={**level, "x": 0, "y": -0.09, "traceorder": "normal"},
    )
    return compose(figure, title, series, height=1000, notes=[*notes, *_attained(series), _GREY_NOTE], below=120)


def _attained(series: Sequence[Series]) -> list[str]:
    """How many requests met the objective, with the interval of that share."""
    found = []
    for each in series:
        goodput = each.summary["goodput"]
        if goodput["attainment"] is not None:
            low, high = goodput["attainment_interval"]
            share = f"{goodput['good']} of {goodput['scheduled']}"
            found.append(f"{each.label}: {share} within the objective ({low:.0%} to {high:.0%}).")
    return found


def _ladders(figure: Any, series: Sequence[Series], objective: Mapping[str, Any]) -> None:
    for col, name in ((1, "ttft_ms"), (2, "tpot_ms")):
        panels.add_ladder(figure, name, series, {"row": 1, "col": col}, objective.get(name))


def _pair(left: str, right: str) -> Any:
    plotly()
    from plotly.subplots import make_subplots

    return make_subplots(rows=1, cols=2, subplot_titles=(left, right), horizontal_spacing=0.1)


def ladder_figure(runs: Runs, title: str = "Percentiles of TTFT and TPOT") -> Any:
    """p50, p90, p95 and p99 of TTFT and TPOT, a line a run."""
    series = series_of(runs)
    figure = _pair("TTFT", "TPOT")
    _ladders(figure, series, _objective(series))
    return compose(figure, title, series, notes=[_GREY_NOTE])


def _objective(series: Sequence[Series]) -> Mapping[str, Any]:
    """The objective that all runs share; none when they differ."""
    found = [each.summary["goodput"]["objective"] for each in series]
    return found[0] if found and all(each == found[0] for each in found) else {}


def ecdf_figure(runs: Runs, title: str = "Every request: TTFT and TPOT") -> Any:
    """The share of requests within a time, for TTFT and TPOT."""
    series = series_of(runs)
    figure = _pair("TTFT", "TPOT")
    panels.add_ecdf(figure, "ttft_ms", series, {"row": 1, "col": 1})
    panels.add_ecdf(figure, "tpot_ms", series, {"row": 1, "col": 2})
    return compose(figure, title, series)


def waterfall_figure(runs: Runs, title: str = "Where TTFT goes") -> Any:
    """Mean TTFT by part, a bar a run."""
    series = series_of(runs)
    figure = plotly().Figure()
    panels.add_waterfall(figure, series, {})
    figure.update_layout(barmode="relative")
    return compose(figure, title, series, height=186 + 46 * len(series))


def parts_figure(runs: Runs, title: str = "Where TTFT and TPOT go") -> Any:
    """Mean TTFT and mean TPOT by part beside each other, a bar a run."""
    series = series_of(runs)
    figure = _pair("TTFT by part", "TPOT by part")
    panels.add_waterfall(figure, series, {"row": 1, "col": 1})
    panels.add_waterfall(figure, series, {"row": 1, "col": 2}, name="tpot")
    figure.update_layout(barmode="relative")
    rows = -(-len({trace.name for trace in figure.data}) // _LEGEND_COLUMNS)
    return compose(figure, title, series, height=206 + 46 * len(series), legend_rows=rows)


def shares_figure(runs: Runs, title: str = "What the ranks do while a step is under way") -> Any:
    """Compute, wait and transfer as shares of prefill steps, of decode steps, and of mixed ones."""
    series = series_of(runs)
    figure = plotly().Figure()
    panels.add_shares(figure, series, {})
    figure.update_layout(barmode="stack")
    return compose(figure, title, series, height=HEIGHT + 40, quiet=_NO_PERCENTILES)


def memory_figure(runs: Runs, title: str = "Memory per rank: split, or copied") -> Any:
    """Weights (hatched where another rank holds the same), KV and what is free, a bar a rank."""
    series = series_of(runs)
    figure = plotly().Figure()
    panels.add_memory(figure, series, {})
    figure.update_layout(barmode="stack")
    note = "Bytes are measured on each rank; that another rank holds the same slice follows from the layout."
    return compose(figure, title, series, height=HEIGHT + 40, notes=[note], quiet=_NO_PERCENTILES)


def rate_figure(runs: Runs, name: str = "ttft_ms", title: str = "") -> Any:
    """Latency against the offered rate: p50 and p99 of the runs of each layout, n beside every point.

    Runs without a rate (closed loops) have no place on it and are left out.
    """
    series = [each for each in series_of(runs) if each.summary.get("rate")]
    figure = plotly().Figure()
    by_layout: dict[str, list[Series]] = {}
    for each in series:
        by_layout.setdefault(str(each.summary.get("layout")), []).append(each)
    for index, points in enumerate(by_layout.values()):
        points.sort(key=lambda each: each.summary["rate"])
        for q in ("p50", "p99"):
            _add_rate_line(figure, name, q, points, index)
    figure.update_xaxes(title_text="offered rate, requests/s", rangemode="tozero")
    figure.update_yaxes(title_text=f"{panels.NAMES[name]}, ms", rangemode="tozero")
    title = title or f"{panels.NAMES[name]} against the rate"
    return compose(figure, title, series, notes=[_GREY_NOTE])


def _add_rate_line(figure: Any, name: str, q: str, points: Sequence[Series], index: int) -> None:
    """Colour and shape tell the layout; a dot in the mark tells p99 from p50."""
    ladders = [each.summary[name] for each in points]
    colour, style = COLOURS[index % len(COLOURS)], points[0]
    symbol = MARKERS[index % len(MARKERS)] + ("-open" if style.provenance == "recorded" else "")
    figure.add_trace(
        plotly().Scatter(
            x=[each.summary["rate"] for each in points],
            y=[ladder[q] for ladder in ladders],
            name=f"{layout_name(style.runs[0])} {q}",
            mode="lines+markers+text",
            text=[f"n = {ladder['n']}" for ladder in ladders],
            textposition="top center",
            textfont={"size": 11},
            line={**style.line, "color": colour},
            marker={
                "symbol": symbol + ("-dot" if q == "p99" else ""),
                "size": 11,
                "color": [GREY if q in ladder["few"] else colour for ladder in ladders],
            },
        )
    )


def bound_figure(
    runs: Runs,
    measured: Mapping[str, float],
    bounds: Mapping[str, float],
    unit: str,
    title: str,
    predicted: str,
) -> Any:
    """Bars of what was measured, and dotted lines of what the arithmetic allows at best.

    `measured` and `bounds`: label → value in `unit`; `predicted` names the formula, for the badge.
    """
    go, labels = plotly(), list(measured)
    figure = go.Figure()
    figure.add_trace(
        go.Bar(
            x=list(range(len(labels))),
            y=[measured[label] for label in labels],
            name="measured",
            text=[f"{measured[label]:.3g}" for label in labels],
            marker=panels.pattern(COLOURS[0], ""),
        )
    )
    for index, label in enumerate(labels):
        if label in bounds:
            _add_bound(figure, index, bounds[label], unit, first=index == 0)
    figure.update_yaxes(title_text=unit, rangemode="tozero")
    figure.update_xaxes(tickvals=list(range(len(labels))), ticktext=labels)
    return compose(figure, title, series_of(runs), predicted=predicted, quiet=_NO_PERCENTILES)


def _add_bound(figure: Any, index: int, value: float, unit: str, first: bool) -> None:
    figure.add_trace(
        plotly().Scatter(
            x=[index - 0.45, index + 0.45],
            y=[value, value],
            mode="lines",
            name="bound",
            showlegend=first,
            line={"color": COLOURS[1], "dash": LINES["predicted"], "width": 3},
            hovertemplate=f"bound {value:.3g} {unit}<extra></extra>",
        )
    )
