"""How every still figure says what it is: measured here, recorded earlier, or predicted, and with what certainty.

The line tells the provenance (solid, dashed, dotted) and nothing else does; the layout is told by colour and
marker together, a part of a bar by colour and hatch, so that no figure needs colour to be read. plotly is
imported when the first figure is drawn, never before.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.layout import read_layout

if TYPE_CHECKING:
    from labkit.lab.run import Run

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Okabe and Ito's palette, the darker ones first; the yellow is too light on white."""
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "star")
LINES = {"measured": "solid", "recorded": "dash", "predicted": "dot"}
GREY, INK, WARNING = "#a6abb2", "#1a1c1f", "#8a3c00"
HEIGHT = 360
TOP, LINE, LEGEND_ROW = 118, 17, 21
"""Pixels above the axes (title, badge, legend, panel titles), and of a line of the footer."""
_TEXT_WIDTH, _BADGE_WIDTH = 98, 92
"""Characters of a line of the footer and of the badge: what a notebook of 700 pixels shows whole."""


def plotly() -> Any:
    """plotly.graph_objects, drawn through the notebook's own renderer: nothing is fetched from anywhere.

    plotly imports jsonschema, which builds a URI grammar for seconds where rfc3987_syntax is installed; it does
    without when the import fails, so it is made to fail for as long as plotly is being imported.
    """
    if "plotly.graph_objects" not in sys.modules:
        _import_plotly()
    return sys.modules["plotly.graph_objects"]


def _import_plotly() -> None:
    name = "rfc3987_syntax"
    hidden = name not in sys.modules
    if hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # how Python spells "may not be imported"
    try:
        import plotly.graph_objects  # noqa: F401
        import plotly.io as pio

        pio.renderers.default = os.environ.get("PLOTLY_RENDERER", "plotly_mimetype")  # this line loads jsonschema
    finally:
        if hidden:
            del sys.modules[name]


@dataclass(frozen=True)
class Series:
    """One layout's runs (or one run) as a figure shows them: `index` gives colour and marker."""

    label: str
    index: int
    summary: dict[str, Any]
    runs: tuple[Run, ...]

    @property
    def provenance(self) -> str:
        kinds = {run.provenance for run in self.runs}
        return "recorded" if "recorded" in kinds else "measured"

    @property
    def bar_label(self) -> str:
        """A bar has no line to be dashed: it says in words that it was recorded."""
        return f"{self.label}<br>recorded" if self.provenance == "recorded" else self.label

    @property
    def colour(self) -> str:
        return COLOURS[self.index % len(COLOURS)]

    @property
    def marker(self) -> str:
        symbol = MARKERS[self.index % len(MARKERS)]
        return symbol + ("-open" if self.provenance == "recorded" else "")

    @property
    def line(self) -> dict[str, Any]:
        return {"color": self.colour, "dash": LINES[self.provenance], "width": 2}


def series_of(runs: dict[str, Run] | Sequence[Run]) -> list[Series]:
    """One series a run, named by its key, or by its layout where there is only a list of runs.

    Raises ValueError for a run that was never summed up (one that is under way, or whose client was killed),
    and for one in which a profiler ran.
    """
    from labkit.lab.run import refuse_profiled

    named = runs if isinstance(runs, dict) else _named(runs)
    refuse_profiled(list(named.values()))
    for run in named.values():
        if "ttft_ms" not in run.summary:
            raise ValueError(f"Run {run.run_id} is {run.status}: it has no summary yet, so nothing can be drawn.")
    return [Series(label, i, run.summary, (run,)) for i, (label, run) in enumerate(named.items())]


def _named(runs: Sequence[Run]) -> dict[str, Run]:
    names = [layout_name(run) for run in runs]
    doubled = len(set(names)) < len(names)
    return {
        f"{name} at {run.summary.get('rate') or 0:.3g}/s" if doubled else name: run
        for name, run in zip(names, runs, strict=True)
    }


def layout_name(run: Run) -> str:
    slug = run.summary.get("layout")
    return str(read_layout(slug)) if slug else "foreign server"


def badge(series: Iterable[Series], predicted: str = "") -> str:
    """The figure's provenance in words: one clause for each kind of line in it."""
    runs = [run for each in series for run in each.runs]
    clauses = []
    for kind, word in (("measured", "measured here (solid)"), ("recorded", "recorded (dashed)")):
        found = [run for run in runs if run.provenance == kind]
        if found:
            clauses.append(f"<b>{word}</b>: {_places(found, with_date=kind == 'recorded')}")
    if predicted:
        clauses.append(f"<b>predicted (dotted)</b>: {predicted}")
    return "; ".join(clauses)


def _places(runs: Sequence[Run], with_date: bool) -> str:
    places = {_place(run.environment, with_date): None for run in runs}
    return " and ".join(places)


def _place(environment: dict[str, Any], with_date: bool) -> str:
    if not environment:
        return "a foreign server"
    cores, fabric = environment["num_cores"], environment["fabric"]
    place = f"{environment['backend']}, {cores} core{'s' * (cores != 1)}, {fabric}"
    return f"{environment['host']}, {environment['started_at'][:10]}, {place}" if with_date else place


def warnings(series: Iterable[Series], quiet: Sequence[str] = ()) -> list[str]:
    """What the runs say against themselves, each sentence once, with the series that it is about."""
    said: dict[str, list[str]] = {}
    for each in series:
        for run in each.runs:
            for verdict in run.quality:
                if verdict["severity"] in ("warn", "bad") and verdict["code"] not in quiet:
                    labels = said.setdefault(verdict["sentence"], [])
                    if each.label not in labels:
                        labels.append(each.label)
    return [f"{'; '.join(labels)}: {sentence}" for sentence, labels in said.items()]


def compose(
    figure: Any,
    title: str,
    series: Sequence[Series],
    *,
    height: int = HEIGHT,
    predicted: str = "",
    notes: Sequence[str] = (),
    below: int = 52,
    quiet: Sequence[str] = (),
    legend_rows: int = 1,
    measured: str = "",
) -> Any:
    """Title, badge, legend and warnings around what was drawn; the same type, ground and margins everywhere.

    Everything outside the axes is placed in pixels, so that figures of any height look alike. `below`: pixels that
    the axes' own labels and legends need under the lowest panel;
    `quiet`: codes of verdicts that do not concern this figure. `legend_rows`: over how many the legend is broken.
    `measured`: for the badge, where it was not measured in a run.
    """
    footer = [_wrapped(f"⚠ {sentence}") for sentence in warnings(series, quiet)]
    footer += [f'<span style="color:{INK}">{_wrapped(note)}</span>' for note in notes]
    footer_px = LINE * sum(text.count("<br>") + 1 for text in footer)
    told = _lines_of(f"<b>measured here (solid)</b>: {measured}; {badge(series, predicted)}" if measured else
                     badge(series, predicted))  # fmt: skip
    inner, more = height - TOP - below, LEGEND_ROW * (legend_rows - 1) + LINE * told.count("<br>")
    height, top = height + more, TOP + more
    _add_head(figure, title, told, height + footer_px, inner)
    figure.update_layout(margin={"l": 64, "r": 24, "t": top, "b": below + footer_px})
    figure.update_xaxes(title_standoff=6, title_font_size=13)
    figure.update_yaxes(title_font_size=13)
    if footer:
        place = {"xref": "paper", "yref": "paper", "x": 0, "y": -below / inner}
        look = {"showarrow": False, "align": "left", "font": {"size": 12, "color": WARNING}}
        text = "<br>".join(footer)
        figure.add_annotation(text=text, xanchor="left", yanchor="top", **place, **look)
    return figure


def log_marks(values: Iterable[float]) -> dict[str, Any]:
    """tickvals and ticktext of a logarithmic axis, whole numbers written out: plotly's own leave out their size.

    As coarse as leaves three marks: powers of ten, else 1-2-5, else every digit.
    """
    finite = [value for value in values if 0 < value < math.inf]
    if not finite:
        return {}
    low, high = min(finite), max(finite)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 2, 5), range(1, 10)):
        every = [digit * 10.0**power for power in powers for digit in digits]
        marks = [mark for mark in every if low / 1.1 <= mark <= 1.1 * high]
        if len(marks) >= 3:
            break
    return {"tickvals": marks, "ticktext": [f"{mark:,.10g}" for mark in marks]}


def _add_head(figure: Any, title: str, subtitle: str, height: int, inner: int) -> None:
    """Title, badge and legend above the axes, whose own height is `inner` pixels."""
    top_left = {"x": 0, "xref": "paper", "y": 1 - 12 / height, "yref": "container", "yanchor": "top"}
    figure.update_layout(
        template="plotly_white",
        height=height,
        title={
            "text": title,
            "subtitle": {"text": subtitle, "font": {"size": 13}},
            "font": {"size": 17},
            **top_left,
        },
        font={"size": 13, "color": INK},
        hoverlabel={"namelength": -1},
        legend={
            **{"orientation": "h", "x": 0, "xanchor": "left", "yanchor": "bottom", "y": 1 + 24 / inner},
            "traceorder": "normal",
        },
    )


def _lines_of(text: str) -> str:
    """A badge that is too long for one line, a clause a line, and a long clause broken between words."""
    import textwrap

    if len(text.replace("<b>", "").replace("</b>", "")) <= _BADGE_WIDTH:
        return text
    tags = len("<b></b>")
    return "<br>".join(line for clause in text.split("; ") for line in textwrap.wrap(clause, _BADGE_WIDTH + tags))


def _wrapped(text: str) -> str:
    """plotly does not break lines."""
    import textwrap

    return "<br>".join(textwrap.wrap(text, _TEXT_WIDTH))
