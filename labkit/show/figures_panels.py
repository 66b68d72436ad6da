"""The panels that figures are made of: each takes a plotly figure, series, and the place to draw in.

A percentile with fewer than ten samples beyond it is drawn grey, as everywhere; the objective is a thin line of
its own; a part of a bar is told by colour and hatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from labkit.measure import metrics
from labkit.measure.breakdown import SHARES, TPOT_PARTS, TTFT_PARTS
from labkit.measure.records import RequestRecord
from labkit.show.figures_memory import Holder, held_by_rank
from labkit.show.figures_style import GREY, WARNING, Series, plotly

PERCENTILES = ("p50", "p90", "p95", "p99")
MIB = 2**20
Place = dict[str, int]
"""{} or {"row": …, "col": …}."""
VALUES: dict[str, Callable[[RequestRecord], float | None]] = {
    "ttft_ms": metrics.ttft_ms,
    "tpot_ms": metrics.tpot_ms,
    "e2el_ms": metrics.e2el_ms,
}
NAMES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2el_ms": "request latency", "itl_ms": "ITL"}
PART_LOOKS = {
    "lateness": ("#777777", "-"),
    "network": ("#999999", "."),
    "queue": ("#E69F00", "/"),
    "prefill_compute": ("#0072B2", ""),
    "compute": ("#0072B2", ""),
    "wait": ("#CC79A7", "\\"),
    "transfer": ("#D55E00", "x"),
    "handoff": ("#009E73", "."),
    "delivery": ("#56B4E9", "+"),
    "unaccounted": ("#222222", "|"),
}
SHARE_LOOKS = {
    "compute": ("#0072B2", ""),
    "wait": ("#CC79A7", "\\"),
    "transfer": ("#D55E00", "x"),
    "idle": ("#e1e4e8", ""),
}
MEMORY_LOOKS = {
    Holder.ALONE: ("#0072B2", ""),
    Holder.SHARED: ("#56B4E9", "/"),
    Holder.KV: ("#009E73", "."),
    Holder.FREE: ("#e1e4e8", ""),
}


def pattern(colour: str, shape: str) -> dict[str, Any]:
    """A bar's filling: hatched in white over its colour."""
    return {
        "color": colour,
        "line": {"width": 0.5, "color": "white"},
        "pattern": {"shape": shape, "fgcolor": "white", "size": 7, "solidity": 0.35},
    }


# ---- percentiles


def add_ladder(
    figure: Any, name: str, series: Sequence[Series], place: Place, objective_ms: float | None = None
) -> None:
    """p50 to p99 of one figure, a line a series; n stands in the legend and beside p50."""
    for each in series:
        _add_one_ladder(figure, name, each, place)
    if objective_ms is not None:
        figure.add_hline(
            objective_ms,
            line={"color": WARNING, "width": 1},
            annotation={
                "text": f"objective {objective_ms:g} ms",
                "font": {"size": 11, "color": WARNING},
                "xanchor": "left",
                "x": 0,
            },
            **place,
        )
    figure.update_yaxes(title_text=f"{NAMES[name]}, ms", rangemode="tozero", **place)
    figure.update_xaxes(categoryorder="array", categoryarray=list(PERCENTILES), **place)


def _add_one_ladder(figure: Any, name: str, series: Series, place: Place) -> None:
    ladder = series.summary.get(name) or {}
    if not ladder.get("n"):
        return
    few = [q for q in PERCENTILES if q in ladder["few"]]
    sure = [q for q in PERCENTILES if q not in few]
    label = f"{series.label} (n = {ladder['n']})"
    if few:
        _add_steps(figure, ladder, sure[-1:] + few, series, f"{label}: too few samples", place, GREY)
    trace = _add_steps(figure, ladder, sure, series, label, place, series.colour)
    trace.showlegend = name == "ttft_ms"


def _add_steps(
    figure: Any, ladder: Mapping[str, Any], steps: Sequence[str], series: Series, name: str, place: Place, colour: str
) -> Any:
    trace = plotly().Scatter(
        x=steps or [PERCENTILES[0]],  # an empty trace would lose its place in the legend
        y=[ladder[q] for q in steps] or [None],
        name=name,
        mode="lines+markers",
        legendgroup=series.label,
        showlegend=False,
        line={**series.line, "color": colour},
        marker={"symbol": series.marker, "size": 10 if colour != GREY else 8, "color": colour},
        hovertemplate=f"%{{x}} %{{y:.1f}} ms<extra>{name}</extra>",
    )
    figure.add_trace(trace, **place)
    return figure.data[-1]


def values_of(series: Series, name: str) -> list[float]:
    """One figure of every counted and completed request, sorted."""
    rows = [r for run in series.runs for r in metrics.counted(run.records, run.window)]
    found = (VALUES[name](r) for r in rows if r.status == "completed")
    return sorted(value for value in found if value is not None)


def add_ecdf(figure: Any, name: str, series: Sequence[Series], place: Place) -> None:
    """The share of requests that took at most so long: every sample is in it, so it hides nothing."""
    for each in series:
        values = values_of(each, name)
        if not values:
            continue
        shares = (np.arange(len(values)) + 1) / len(values)
        every = max(1, len(values) // 8)
        figure.add_trace(
            plotly().Scatter(
                x=values,
                y=shares * 100,
                name=f"{each.label} (n = {len(values)})",
                legendgroup=each.label,
                showlegend=name == "ttft_ms",
                mode="lines+markers",
                line={**each.line, "shape": "hv"},
                marker={
                    "symbol": each.marker,
                    "color": each.colour,
                    "size": [9 if i % every == every // 2 else 0 for i in range(len(values))],
                },
                hovertemplate=f"%{{y:.0f}} %% within %{{x:.1f}} ms<extra>{each.label}</extra>",
            ),
            **place,
        )
    figure.update_xaxes(title_text=f"{NAMES[name]}, ms", rangemode="tozero", **place)
    figure.update_yaxes(title_text="requests within, %", range=[0, 102], **place)


# ---- where the time went


def add_waterfall(
    figure: Any, series: Sequence[Series], place: Place, legend: str = "legend", name: str = "ttft"
) -> None:
    """Mean TTFT (or, with `name` "tpot", TPOT) by part: means, because only means add up.

    TPOT's panel stands to the right of TTFT's, whose bars are named already and whose legend has most of its parts.
    """
    beside = name == "tpot"
    numbers = [(each.summary.get(f"{name}_parts") or {}).get("n", 0) for each in series]
    names = [each.bar_label.replace("<br>", ", ") for each in series]
    labels = [f"{name} (n = {n})" for name, n in zip(names, numbers, strict=True)]
    for part in TPOT_PARTS if beside else TTFT_PARTS:
        values = [(each.summary.get(f"{name}_parts_ms") or {}).get(part) or 0.0 for each in series]
        if max(map(abs, values), default=0) < (0.005 if beside else 0.05):
            continue
        figure.add_trace(
            plotly().Bar(
                y=labels,
                x=values,
                name=part.replace("_", " "),
                orientation="h",
                marker=pattern(*PART_LOOKS[part]),
                legend=legend,
                showlegend=not beside or part not in TTFT_PARTS,
                hovertemplate=f"{part.replace('_', ' ')} %{{x:.2f}} ms<extra>%{{y}}</extra>",
            ),
            **place,
        )
    figure.update_yaxes(autorange="reversed", **place)
    if beside:
        figure.update_yaxes(showticklabels=False, **place)
    figure.update_xaxes(title_text=f"mean {name.upper()} by part, ms", **place)


def add_shares(figure: Any, series: Sequence[Series], place: Place, legend: str = "legend") -> None:
    """Of the time in which a step of a phase was under way: what the ranks did."""
    columns = [(each, phase) for phase in ("prefill", "decode", "mixed") for each in series]
    shares = [(each.summary["step_share"].get("by_phase") or {}).get(phase) for each, phase in columns]
    kept = [(column, share) for column, share in zip(columns, shares, strict=True) if share]
    labels = [[phase for (_, phase), _ in kept], [each.bar_label for (each, _), _ in kept]]
    for name in SHARES:
        figure.add_trace(
            plotly().Bar(
                x=labels,
                y=[share[name] * 100 for _, share in kept],
                name="between and around" if name == "idle" else name,
                marker=pattern(*SHARE_LOOKS[name]),
                legend=legend,
                hovertemplate=f"{name} %{{y:.1f}} %<extra>%{{x}}</extra>",
            ),
            **place,
        )
    figure.update_yaxes(title_text="share of step time, %", range=[0, 100], **place)
    figure.update_xaxes(tickangle=0, tickfont_size=11, **place)


# ---- memory


def add_memory(figure: Any, series: Sequence[Series], place: Place, legend: str = "legend") -> None:
    """Per rank, in MiB: weights that it holds alone, weights that another rank holds too, KV, free."""
    held = [(each, rank, parts) for each in series for rank, parts in held_by_rank(each.summary).items()]
    labels = [[each.bar_label for each, _, _ in held], [f"r{rank}" for _, rank, _ in held]]
    for kind in Holder:
        values = [parts.get(kind, 0) / MIB for _, _, parts in held]
        if max(values, default=0) < 0.005:
            continue
        figure.add_trace(
            plotly().Bar(
                x=labels,
                y=values,
                name=kind.value,
                marker=pattern(*MEMORY_LOOKS[kind]),
                legend=legend,
                hovertemplate=f"{kind.value} %{{y:.2f}} MiB<extra>%{{x}}</extra>",
            ),
            **place,
        )
    figure.update_yaxes(title_text="memory per rank, MiB", **place)
    figure.update_xaxes(tickangle=0, tickfont_size=11, **place)
    budgets = {int((each.summary.get("settings") or {}).get("memory_per_rank") or 0) for each in series}
    for budget in sorted(budgets - {0}):
        text = f"budget {budget / MIB:.4g} MiB"
        figure.add_hline(
            budget / MIB,
            line={"color": WARNING, "width": 1},
            annotation={"text": text, "font": {"size": 11, "color": WARNING}},
            **place,
        )
