"""What crosses between ranks, as a plot of size by frequency: one mark an axis and phase, from recorded collectives.

Both scales are logarithmic, so that equal products lie on straight lines: a mark that slides along one carries as many
bytes, in more pieces or in fewer. Colour and a word tell the axis, the shape of the mark tells the phase.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from labkit.layout import AXES, Layout
from labkit.measure.crossings import Crossings, crossings
from labkit.show.figures_places import SIDES, places
from labkit.show.figures_style import COLOURS, GREY, HEIGHT, Series, compose, plotly, series_of

if TYPE_CHECKING:
    from labkit.lab.run import Run

_SHAPES = {"prefill": "square", "decode": "circle", "mixed": "diamond"}
_UNITS = ("B", "kB", "MB", "GB", "TB")
_PADDING = 0.6
"""Of a decade, left free around the marks."""
_SHORTEST = 0.5
"""Of a decade: a line below that has no room for its name."""


def crossings_figure(
    runs: dict[str, Run] | Sequence[Run], title: str = "What crosses between the ranks", per: str = "token"
) -> Any:
    """Bytes of a crossing against crossings per token (or per second), for every axis and phase of the runs.

    Raises ValueError for another `per`, and where no run recorded a crossing.
    """
    series = series_of(runs)
    found = [(each, point) for each in series for run in each.runs for point in _crossings(run)]
    if not found:
        raise ValueError("No crossing was recorded: the runs used one rank, or `record` was off.")
    figure = plotly().Figure()
    xs = [point.num_per(per) for _, point in found]
    ys = [max(point.bytes_each, 1.0) for _, point in found]
    x_range, y_range = _range(xs), _range(ys)
    line_names = _add_equal_products(figure, x_range, y_range, per)
    names = [_name(each, point, several=len(series) > 1) for each, point in found]
    shares = [(_share(x, x_range), _share(y, y_range)) for x, y in zip(xs, ys, strict=True)]
    lines = [(_share(end, x_range), _share(size, y_range), "top left", text) for end, size, text in line_names]
    sides = places(shares, names, [each.index % len(SIDES) for each, _ in found], lines)
    for (each, point), x, y, name, side in zip(found, xs, ys, names, sides, strict=True):
        _add_mark(figure, each, point, x, y, name, side)
    _add_phases(figure, found)
    figure.update_xaxes(type="log", range=x_range, dtick=1, title_text=f"crossings per {per}")
    ticks = [10.0**k for k in range(math.floor(y_range[0]), math.ceil(y_range[1]) + 1)]
    figure.update_yaxes(
        type="log", range=y_range, tickvals=ticks, ticktext=[size_text(t) for t in ticks], title_text="bytes of one"
    )
    return compose(figure, title, series, height=HEIGHT + 120, notes=_notes(series, found, per), quiet=("samples",))


def _crossings(run: Run) -> list[Crossings]:
    return crossings(run.collectives, run.step_records)


def size_text(num_bytes: float) -> str:
    """1 kB is 1,000 bytes, as in links' rates."""
    power = min(len(_UNITS) - 1, max(0, math.floor(math.log10(max(num_bytes, 1)) / 3 + 1e-9)))
    return f"{num_bytes / 1000**power:.3g} {_UNITS[power]}"


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Exponents of ten around the values."""
    logs = [math.log10(value) for value in values]
    return min(logs) - _PADDING, max(logs) + _PADDING


def _share(value: float, ends: tuple[float, float]) -> float:
    return (math.log10(value) - ends[0]) / (ends[1] - ends[0])


def _name(each: Series, point: Crossings, several: bool) -> str:
    return f"{point.axis.upper()} {each.label}" if several else point.axis.upper()


def _add_mark(figure: Any, each: Series, point: Crossings, x: float, y: float, name: str, side: str) -> None:
    axis = point.axis.upper()
    recorded = "-open" if each.provenance == "recorded" else ""
    figure.add_trace(
        plotly().Scatter(
            x=[x],
            y=[y],
            mode="markers+text",
            text=[name],
            textposition=side,
            name=f"{each.label}: {axis} {point.phase}",
            showlegend=False,
            cliponaxis=False,
            marker={"symbol": _SHAPES[point.phase] + recorded, "size": 13, "color": _colour(point.axis)},
            hovertemplate=f"{each.label}, {axis}, {point.phase}<br>{point.num:,} crossings of {size_text(y)} "
            f"for {point.num_tokens:,} tokens<extra></extra>",
        )
    )


def _colour(axis: str) -> str:
    return COLOURS[AXES.index(axis) % len(COLOURS)] if axis in AXES else GREY


def _add_phases(figure: Any, found: Sequence[tuple[Series, Crossings]]) -> None:
    """A legend of shapes: the axis stands beside every mark."""
    for phase, symbol in _SHAPES.items():
        if any(point.phase == phase for _, point in found):
            marker = {"symbol": symbol, "size": 11, "color": GREY}
            figure.add_trace(plotly().Scatter(x=[None], y=[None], mode="markers", name=phase, marker=marker))


def _add_equal_products(
    figure: Any, x_range: tuple[float, float], y_range: tuple[float, float], per: str
) -> list[tuple[float, float, str]]:
    """Lines of equal times × bytes, a decade apart, named where they leave the frame at the bottom or the right:
    returns where, and the names.
    """
    named = []
    for power in range(math.ceil(x_range[0] + y_range[0]), math.floor(x_range[1] + y_range[1]) + 1):
        left, right = max(x_range[0], power - y_range[1]), min(x_range[1], power - y_range[0])
        if right - left < _SHORTEST:
            continue
        named.append((10**right, 10 ** (power - right), f"{size_text(10.0**power)} per {per}"))
        figure.add_trace(
            plotly().Scatter(
                x=[10**left, 10**right],
                y=[10 ** (power - left), 10 ** (power - right)],
                mode="lines+text",
                text=["", f"{size_text(10.0**power)} per {per}"],
                textposition="top left",
                textfont={"size": 11, "color": GREY},
                line={"color": GREY, "width": 1},
                opacity=0.7,
                hoverinfo="skip",
                showlegend=False,
                name=f"{size_text(10.0**power)} per {per}",
            )
        )
    return named


def _notes(series: Sequence[Series], found: Sequence[tuple[Series, Crossings]], per: str) -> list[str]:
    notes = [
        "A crossing is one operation of one group; its bytes are what one of its ranks gives. Along a grey line the "
        f"bytes per {per} are the same."
    ]
    for each in series:
        here = {point.axis for owner, point in found if owner is each}
        silent = [a.upper() for a in AXES if getattr(_layout(each), a) > 1 and a not in here]
        if silent:
            notes.append(f"{each.label}: {' and '.join(silent)} has no mark, for nothing of it was recorded.")
    return notes


def _layout(each: Series) -> Layout:
    return Layout.parse(each.summary["layout"])
