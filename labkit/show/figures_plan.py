"""Still figures of what was planned: simulated latencies and queues, the parts of a predicted step, and how far each
situation was from its limit before and after its layout.

What a cost model says is dotted and its marks are open; what was measured stays solid and filled, as in every figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.show.figures_panels import pattern
from labkit.show.figures_style import COLOURS, HEIGHT, LINES, MARKERS, WARNING, compose, log_marks, plotly

if TYPE_CHECKING:
    from labkit.plan.objective import PlanObjective
    from labkit.plan.simulate import SimResult

MOST_POINTS = 200
"""Of a line: more are not seen."""
PART_LOOKS = (("#0072B2", ""), ("#56B4E9", "/"), ("#009E73", "."), ("#E69F00", "\\"), ("#D55E00", "x"),
              ("#CC79A7", "+"), ("#777777", "-"), ("#999999", "|"))  # fmt: skip
_TITLES = ("TTFT", "TPOT", "requests in the queue", "KV in use")


def simulated_figure(
    results: Mapping[str, SimResult], objective: PlanObjective, title: str, predicted: str
) -> Any:
    """TTFT and TPOT of the simulated requests that are judged, queue and KV cache over time, a line a layout.

    predicted: by what, for the badge.
    """
    plotly()
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=2, cols=2, subplot_titles=_TITLES, vertical_spacing=0.2, horizontal_spacing=0.1)
    for index, (label, result) in enumerate(results.items()):
        look = _look(index)
        kept = result.steady()
        _add_share(figure, 1e3 * result.ttft_s[kept], label, look, {"row": 1, "col": 1})
        _add_share(figure, 1e3 * result.tpot_s[kept], label, look, {"row": 1, "col": 2})
        _add_series(figure, result.waiting.means(), result.waiting.span_s, label, look, {"row": 2, "col": 1})
        used = 100 * result.kv_blocks.means() / max(1, result.kv_total_blocks)
        _add_series(figure, used, result.kv_blocks.span_s, label, look, {"row": 2, "col": 2})
    for col, (limit, name) in enumerate(((objective.ttft_ms, "TTFT"), (_tpot_limit(objective), "TPOT")), 1):
        times = [x for trace in figure.select_traces(row=1, col=col) for x in trace.x] + ([limit] if limit else [])
        figure.update_xaxes(title_text=f"{name}, ms", type="log", **log_marks(times), row=1, col=col)
        figure.update_yaxes(title_text="requests within, %", range=[0, 102], row=1, col=col)
        figure.update_xaxes(title_text="time, s", rangemode="tozero", tickformat=",.6~g", row=2, col=col)
        if limit is not None:
            figure.add_vline(limit, line={"color": WARNING, "width": 1}, row=1, col=col)
    figure.update_yaxes(title_text="requests", rangemode="tozero", row=2, col=1)
    figure.update_yaxes(title_text="% of blocks", range=[0, 102], row=2, col=2)
    notes = [f"The thin line is what is asked: {objective}."] if not objective.asks_nothing else []
    notes.append("TTFT and TPOT without the requests that found the server empty, or nobody behind them.")
    return compose(figure, title, [], height=2 * HEIGHT, predicted=predicted, notes=notes)


def _tpot_limit(objective: PlanObjective) -> float | None:
    """Of TPOT itself, or of one answer's tokens a second."""
    if objective.answer_tokens_per_s is not None:
        return 1e3 / objective.answer_tokens_per_s
    return objective.tpot_ms


def _look(index: int) -> dict[str, Any]:
    colour = COLOURS[index % len(COLOURS)]
    return {
        "line": {"color": colour, "dash": LINES["predicted"], "width": 2},
        "marker": {"symbol": MARKERS[index % len(MARKERS)] + "-open", "color": colour},
    }


def _add_share(figure: Any, values: Any, label: str, look: Mapping[str, Any], place: dict[str, int]) -> None:
    """The share of requests within a time; of many, as many points as are seen."""
    values = np.sort(values[~np.isnan(values)])
    if not len(values):
        return
    kept = np.unique(np.linspace(0, len(values) - 1, min(len(values), MOST_POINTS)).astype(int))
    _add_line(figure, values[kept], 100 * (kept + 1) / len(values), label, look, place, place == {"row": 1, "col": 1})


def _add_series(
    figure: Any, values: Any, span_s: float, label: str, look: Mapping[str, Any], place: dict[str, int]
) -> None:
    width = max(1, -(-len(values) // MOST_POINTS))
    heights = [float(values[at : at + width].mean()) for at in range(0, len(values), width)]
    times = [(at + width / 2) * span_s for at in range(0, len(values), width)]
    _add_line(figure, times, heights, label, look, place, False)


def _add_line(
    figure: Any, xs: Any, ys: Any, label: str, look: Mapping[str, Any], place: dict[str, int], legend: bool
) -> None:
    every = max(1, len(xs) // 8)
    sizes = [9 if at % every == every // 2 else 0 for at in range(len(xs))]
    figure.add_trace(
        plotly().Scatter(
            x=list(xs), y=list(ys), name=label, legendgroup=label, showlegend=legend, mode="lines+markers",
            line=look["line"], marker={**look["marker"], "size": sizes},
            hovertemplate=f"%{{x:.4g}}, %{{y:.3g}}<extra>{label}, simulated</extra>",
        ),
        **place,
    )  # fmt: skip


def step_parts_figure(steps: Mapping[str, Mapping[str, float]], title: str, predicted: str) -> Any:
    """A bar a step: the predicted ms of its parts (label → part → seconds), which add up to it."""
    figure = plotly().Figure()
    names = list(dict.fromkeys(name for parts in steps.values() for name in parts))
    for index, name in enumerate(names):
        values = [1e3 * parts.get(name, 0.0) for parts in steps.values()]
        if max(values) <= 0:
            continue
        look = pattern(*PART_LOOKS[index % len(PART_LOOKS)])
        look["line"] = {"width": 1.5, "color": "#555555"}
        figure.add_trace(
            plotly().Bar(
                y=list(steps), x=values, name=name, orientation="h", marker=look,
                hovertemplate=f"{name} %{{x:.2f}} ms<extra>%{{y}}</extra>",
            )
        )  # fmt: skip
    figure.update_layout(barmode="stack")
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title_text="a step by part, ms")
    return compose(figure, title, [], height=206 + 46 * len(steps), predicted=predicted, legend_rows=2)


# ---- before and after, over its limit


def ratios_figure(
    measured: Mapping[str, tuple[float, float]],
    predicted: Mapping[str, tuple[float, float]],
    title: str,
    by: str,
    where: str,
) -> Any:
    """For each situation how many times its limit the worst wish is, before its change and after it; 1: just met.

    measured, predicted: situation → (before, after); by, where: the badge's words for a prediction, a measurement.
    """
    figure = plotly().Figure()
    names = list(dict.fromkeys([*predicted, *measured]))
    for kind, found in (("measured", measured), ("predicted", predicted)):
        shift = -0.12 if kind == "measured" else 0.12
        _add_ratios(figure, kind, {names.index(name) + shift: pair for name, pair in found.items()})
    figure.add_hline(1.0, line={"color": WARNING, "width": 1})
    ratios = [ratio for found in (measured, predicted) for pair in found.values() for ratio in pair]
    figure.update_yaxes(type="log", title_text="figure ÷ its limit", **log_marks([1.0, *ratios]))
    figure.update_xaxes(tickvals=list(range(len(names))), ticktext=[name.replace(", ", ",<br>") for name in names],
                        range=[-0.5, len(names) - 0.5])  # fmt: skip
    return compose(figure, title, [], height=HEIGHT + 60, predicted=by, measured=where if measured else "",
                   below=64, legend_rows=2,
                   notes=["Below the thin line the wish is met (tokens per second: limit ÷ figure)."])  # fmt: skip


def _add_ratios(figure: Any, kind: str, pairs: Mapping[float, Sequence[float]]) -> None:
    open_ = "" if kind == "measured" else "-open"
    colour = COLOURS[0] if kind == "measured" else COLOURS[1]
    for at, (before, after) in pairs.items():
        figure.add_trace(
            plotly().Scatter(x=[at, at], y=[before, after], mode="lines", showlegend=False, hoverinfo="skip",
                             line={"color": colour, "dash": LINES[kind], "width": 2})  # fmt: skip
        )
    for index, (name, symbol) in enumerate((("before", "circle"), ("after", "diamond"))):
        figure.add_trace(
            plotly().Scatter(
                x=list(pairs), y=[pair[index] for pair in pairs.values()], mode="markers", name=f"{name}, {kind}",
                marker={"symbol": symbol + open_, "size": 12, "color": colour},
                hovertemplate=f"%{{y:.2f}} × its limit<extra>{name}, {kind}</extra>",
            )
        )  # fmt: skip
