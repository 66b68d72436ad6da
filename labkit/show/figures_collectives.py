"""The time of a collective by its size, as `labkit bench collectives` measured it, and a model's messages on the curve.

Where a message stands tells what it pays for: on the flat part latency, on the slope bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.show.figures_style import COLOURS, HEIGHT, INK, LINES, MARKERS, compose, plotly

Found = Mapping[str, Any]


def curve_figure(found: Found, op: str = "all_reduce", title: str = "") -> Any:
    """found: what `labkit bench collectives --json` prints. Raises ValueError when `op` is not in it."""
    rows = [row for row in found["rows"] if row["op"] == op and row["group"] == 0]
    if not rows:
        raise ValueError(f"{op} was not measured; there are {', '.join(sorted({r['op'] for r in found['rows']}))}.")
    figure = plotly().Figure()
    places = sorted({row["in_place"] for row in rows}, reverse=True)
    for index, in_place in enumerate(places):
        _add_curve(figure, index, [row for row in rows if row["in_place"] == in_place])
    _add_line(figure, found, op, places[0], rows)
    marks = [mark for mark in found.get("marks") or [] if mark["op"] == op]
    for index, mark in enumerate(marks):
        _add_mark(figure, index, mark)
    figure.update_xaxes(title_text="bytes of the buffer", type="log", tickvals=_ticks(rows, marks), ticktext=[
        _size(value) for value in _ticks(rows, marks)])  # fmt: skip
    figure.update_yaxes(title_text="time, µs", type="log", dtick=1)
    ranks = f"{rows[0]['ranks']} ranks, {found['device']}, {rows[0]['fabric']}"
    measured = f"{ranks}, median of {found['rounds']} rounds, results {'checked' if found['checked'] else 'unchecked'}"
    title = title or f"One {op} by its size"
    line = "α + bytes ÷ β through the points"
    return compose(figure, title, [], height=HEIGHT + 40, predicted=line, notes=[_said(m) for m in marks],
                   measured=measured)  # fmt: skip


def _add_curve(figure: Any, index: int, rows: Sequence[Found]) -> None:
    colour = COLOURS[index]
    figure.add_trace(
        plotly().Scatter(
            x=[row["bytes"] for row in rows],
            y=[row["time_us"] for row in rows],
            name="in place" if rows[0]["in_place"] else "out of place",
            mode="lines+markers",
            line={"color": colour, "dash": LINES["measured"], "width": 2},
            marker={"symbol": MARKERS[index], "size": 9, "color": colour},
            hovertemplate="%{x} bytes: %{y:.1f} µs<extra></extra>",
        )
    )


def _add_line(figure: Any, found: Found, op: str, in_place: bool, rows: Sequence[Found]) -> None:
    line = next((fit for fit in found["fits"] if fit["op"] == op and fit["in_place"] == in_place), None)
    if line is None:
        return
    sizes = sorted({row["bytes"] for row in rows})
    per_byte = 1e-3 / line["gb_per_s"] if line["gb_per_s"] else 0.0
    figure.add_trace(
        plotly().Scatter(
            x=sizes,
            y=[line["alpha_us"] + size * per_byte for size in sizes],
            name="α + bytes ÷ β",
            mode="lines",
            line={"color": INK, "dash": LINES["predicted"], "width": 2},
        )
    )


def _add_mark(figure: Any, index: int, mark: Found) -> None:
    """A message's place: an upright line, named above the axes in turn so that names do not meet."""
    figure.add_vline(x=mark["bytes"], line={"color": COLOURS[(index + 2) % len(COLOURS)], "width": 2, "dash": "dash"})
    figure.add_annotation(
        x=_log10(mark["bytes"]), y=0.97 - 0.09 * (index % 3), xref="x", yref="paper", text=f" {mark['phase']}",
        showarrow=False, xanchor="left", font={"size": 12},
    )  # fmt: skip


def _log10(value: float) -> float:
    import math

    return math.log10(value)


def _ticks(rows: Sequence[Found], marks: Sequence[Found]) -> list[int]:
    """Powers of sixteen from the smallest to the largest size."""
    sizes = [row["bytes"] for row in rows] + [mark["bytes"] for mark in marks]
    return [16**power for power in range(1, 9) if min(sizes) / 4 <= 16**power <= max(sizes) * 4]


def _size(num_bytes: int) -> str:
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:g} {unit}"
    return f"{num_bytes} B"


def _said(mark: Found) -> str:
    messages = f"{mark['phase']}: {mark['count']} × {_size(mark['bytes'])} in a step"
    if mark["step_us"] is None:
        return f"{messages}."
    return f"{messages}, by the line {mark['time_us']:.0f} µs each and {mark['step_us'] / 1e3:.2f} ms together."
