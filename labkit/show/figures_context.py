"""Figures of shared-out sequences: TTFT by prompt length, and what KV capacity costs in TPOT.

As everywhere the line tells the provenance; layouts are told by colour and marker, and n stands at every point.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.show import figures_panels as panels
from labkit.show.figures import Runs
from labkit.show.figures_style import COLOURS, HEIGHT, Series, compose, plotly, series_of

_NO_PERCENTILES = ("samples",)


def length_figure(
    runs: Runs, values: Mapping[str, Mapping[int, Sequence[float]]], title: str = "TTFT by prompt length"
) -> Any:
    """Median TTFT at each prompt length, a line a run, every request as a small mark.

    values: label (as in `runs`) → prompt tokens → TTFT in ms of each request.
    """
    series = series_of(runs)
    figure = plotly().Figure()
    for each in series:
        _add_lengths(figure, each, values[each.label])
    lengths = sorted({length for found in values.values() for length in found})
    figure.update_xaxes(title_text="prompt, tokens", type="log", tickvals=lengths, ticktext=[f"{n:,}" for n in lengths])
    figure.update_yaxes(title_text="TTFT p50, ms", type="log")
    return compose(figure, title, series, height=HEIGHT + 60, quiet=_NO_PERCENTILES)


def _add_lengths(figure: Any, series: Series, values: Mapping[int, Sequence[float]]) -> None:
    lengths = sorted(values)
    counts = {len(values[length]) for length in lengths}
    n = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    figure.add_trace(
        plotly().Scatter(
            x=lengths,
            y=[statistics.median(values[length]) for length in lengths],
            name=f"{series.label} (n = {n} at each length)",
            mode="lines+markers",
            legendgroup=series.label,
            line=series.line,
            marker={"symbol": series.marker, "size": 11, "color": series.colour},
            hovertemplate=f"%{{x}} tokens: %{{y:.1f}} ms<extra>{series.label}</extra>",
        )
    )
    figure.add_trace(
        plotly().Scatter(
            x=[length for length in lengths for _ in values[length]],
            y=[value for length in lengths for value in values[length]],
            mode="markers",
            legendgroup=series.label,
            showlegend=False,
            marker={"symbol": series.marker, "size": 5, "color": series.colour, "opacity": 0.45},
            hoverinfo="skip",
        )
    )


def capacity_figure(runs: Runs, tokens: Mapping[str, int], title: str = "KV capacity against TPOT") -> Any:
    """Two panels of bars: KV tokens that fit (`tokens`, by label), and TPOT p50 of the run, a bar a layout."""
    plotly()
    from plotly.subplots import make_subplots

    series = series_of(runs)
    figure = make_subplots(rows=1, cols=2, subplot_titles=("KV tokens that fit", "TPOT p50"), horizontal_spacing=0.12)
    labels = [each.bar_label for each in series]
    figure.add_trace(_bars(labels, [tokens[each.label] for each in series], "{:,.0f}", 2), row=1, col=1)
    ladders = [each.summary["tpot_ms"] for each in series]
    texts = [f"{{:.3g}} ms (n = {ladder['n']})" for ladder in ladders]
    figure.add_trace(_bars(labels, [ladder["p50"] for ladder in ladders], texts, 0), row=1, col=2)
    figure.update_yaxes(title_text="tokens, all ranks together", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="ms", rangemode="tozero", row=1, col=2)
    figure.update_layout(showlegend=False)
    return compose(figure, title, series)


def _bars(labels: list[str], values: Sequence[float | None], text: str | list[str], colour: int) -> Any:
    texts = [text] * len(values) if isinstance(text, str) else text
    shown = ["" if value is None else each.format(value) for each, value in zip(texts, values, strict=True)]
    return plotly().Bar(x=labels, y=list(values), text=shown, marker=panels.pattern(COLOURS[colour], ""))
