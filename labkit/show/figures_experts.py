"""Still figures of a mixture of experts: who was asked, and what that makes of the ranks.

Both are drawn from the steps' own records. The average is a line, and whoever is busiest is hatched and named: an
average says what there is to do, the busiest says how long it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.measure.expert_totals import ExpertTotals, expert_totals
from labkit.show import figures_panels as panels
from labkit.show.figures import Runs
from labkit.show.figures_style import COLOURS, HEIGHT, INK, Series, compose, plotly, series_of

_QUIET = ("samples",)
_BUSIEST = "x"
"""The hatch of the busiest."""
_NS_PER_MS = 1e6


def totals_of(series: Series) -> ExpertTotals:
    """Over all steps of a series' runs. Raises ValueError when none tells of experts."""
    return expert_totals(step for run in series.runs for step in run.step_records)


def expert_load_figure(runs: Runs, title: str = "How often each expert is asked") -> Any:
    """Each expert's share of all choices, a panel a run; the average is a line, the busiest is hatched."""
    series = series_of(runs)
    totals = [totals_of(each) for each in series]
    plotly()
    from plotly.subplots import make_subplots

    names = [each.bar_label.replace("<br>", ", ") for each in series]
    figure = make_subplots(rows=1, cols=len(series), subplot_titles=names, shared_yaxes=True, horizontal_spacing=0.03)
    for col, (each, found) in enumerate(zip(series, totals, strict=True), start=1):
        _add_experts(figure, found, each, {"row": 1, "col": col})
    figure.update_yaxes(title_text="share of all choices, %", rangemode="tozero", row=1, col=1)
    note = "All MoE layers together: single layers are less even than their sum. Dropped choices are counted."
    return compose(figure, title, series, height=HEIGHT, notes=[note], quiet=_QUIET)


def _add_experts(figure: Any, totals: ExpertTotals, series: Series, place: panels.Place) -> None:
    asked, busiest = max(1, sum(totals.tokens)), totals.busiest_expert
    shares = [100 * tokens / asked for tokens in totals.tokens]
    average = 100 / len(shares)
    hatches = [_BUSIEST if expert == busiest else "" for expert in range(len(shares))]
    figure.add_trace(
        plotly().Bar(
            x=list(map(str, range(len(shares)))),
            y=shares,
            name=series.label,
            customdata=totals.tokens,
            marker=panels.pattern(series.colour, "") | {"pattern": _hatched(hatches)},
            text=[f"{shares[busiest] / average:.1f}×" if hatch else "" for hatch in hatches],
            textposition="outside",
            cliponaxis=False,
            showlegend=False,
            hovertemplate=f"expert %{{x}}: %{{y:.1f}} %, %{{customdata:,}} tokens<extra>{series.label}</extra>",
        ),
        **place,
    )
    figure.add_hline(
        average,
        line={"color": INK, "width": 1},
        annotation={"text": "average", "font": {"size": 11}, "xanchor": "right"},
        **place,
    )
    figure.update_xaxes(title_text="expert", type="category", **place)


def _hatched(hatches: Sequence[str]) -> dict[str, Any]:
    return {"shape": list(hatches), "fgcolor": "white", "size": 7, "solidity": 0.35}


def expert_ranks_figure(runs: Runs, title: str = "What the ranks have to do for that, and who waits") -> Any:
    """By rank: rows that its experts computed, and how long it waited in the combines for the busiest."""
    series = series_of(runs)
    totals = [totals_of(each) for each in series]
    plotly()
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=1, cols=2, horizontal_spacing=0.1, subplot_titles=("Rows computed", "Waited for the busiest rank")
    )
    rows = [found.rows for found in totals]
    waits = [{rank: ns / _NS_PER_MS for rank, ns in found.wait_ns.items()} for found in totals]
    _add_ranks(figure, series, rows, totals, {"row": 1, "col": 1}, ("rows of all steps", ",.0f"))
    _add_ranks(figure, series, waits, totals, {"row": 1, "col": 2}, ("ms of all steps", ",.1f"))
    note = "Rows follow from the routing and are exact. Waits are the machine's: a rank without a core is late too."
    return compose(figure, title, series, height=HEIGHT + 20, notes=[note], below=72, quiet=_QUIET)


def _add_ranks(
    figure: Any,
    series: Sequence[Series],
    values: Sequence[dict[int, float]] | Sequence[dict[int, int]],
    totals: Sequence[ExpertTotals],
    place: panels.Place,
    unit: tuple[str, str],
) -> None:
    """A bar a rank, hatched for the rank with most rows; a stroke at the mean of a run's ranks."""
    bars = [(each, rank, found) for each, found in zip(series, totals, strict=True) for rank in found.rows]
    labels = [[each.bar_label for each, _, _ in bars], [f"r{rank}" for _, rank, _ in bars]]
    heights = [found[rank] for found in values for rank in found]
    means = [sum(found.values()) / len(found) for found in values for _ in found]
    name, form = unit
    figure.add_trace(
        plotly().Bar(
            x=labels,
            y=heights,
            name="a rank (hatched: the one with most rows)",
            marker=panels.pattern(COLOURS[0], "")
            | {"pattern": _hatched([_BUSIEST if rank == found.busiest_rank else "" for _, rank, found in bars])},
            showlegend=place["col"] == 1,
            hovertemplate=f"%{{y:{form}}} {name}<extra>%{{x}}</extra>",
        ),
        **place,
    )
    figure.add_trace(
        plotly().Scatter(
            x=labels,
            y=means,
            mode="markers",
            name="mean of the run's ranks",
            marker={"symbol": "line-ew-open", "size": 26, "line": {"width": 2}, "color": INK},
            showlegend=place["col"] == 1,
            hovertemplate=f"mean %{{y:{form}}} {name}<extra>%{{x}}</extra>",
        ),
        **place,
    )
    figure.update_yaxes(title_text=name, rangemode="tozero", **place)
    figure.update_xaxes(tickangle=0, tickfont_size=11, **place)
