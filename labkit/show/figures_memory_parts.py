"""Two layouts' memory part by part: what a split divides, and what stays as large as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labkit.measure.memory import Change, MemoryAccount, memory_account, part_by_part
from labkit.show.figures_panels import MIB, pattern
from labkit.show.figures_style import HEIGHT, INK, LINES, Series, compose, plotly, series_of

if TYPE_CHECKING:
    from labkit.lab.run import Run

_HATCHES = ("", "/")


def memory_parts_figure(one: Run, other: Run, title: str = "") -> Any:
    """Each part on the fullest rank of either layout, and by how much it changed; counted bytes as dotted lines."""
    series = series_of([one, other])
    accounts = [memory_account(each.summary) for each in series]
    # The KV pool is what the budget leaves: told, not drawn, for beside it no other part could be seen.
    found = {change.name: change for change in part_by_part(*accounts) if change.before or change.after}
    pool, changes = found.pop("kv", None), list(found.values())
    names = [change.name.replace("_", " ") for change in changes]
    ratios = ["" if change.ratio is None else f"×{change.ratio:.2f}" for change in changes]
    figure = plotly().Figure()
    for index, (each, account) in enumerate(zip(series, accounts, strict=True)):
        _add_measured(figure, each, account, names, [change.name for change in changes], ratios if index else None)
        _add_counted(figure, index, account, [change.name for change in changes])
    figure.update_layout(barmode="group", bargap=0.2)
    figure.update_yaxes(title_text="MiB on the fullest rank", rangemode="tozero")
    figure.update_xaxes(tickvals=list(range(len(names))), ticktext=names)
    title = title or f"{series[0].label} and {series[1].label}: memory of a rank, part by part"
    notes = ["×: the second layout's bytes over the first's.", *_pool(pool), *_unmeasured(accounts)]
    return compose(
        figure, title, series, height=HEIGHT + 40, notes=notes, predicted="from the model's shapes", quiet=("samples",)
    )


def _add_measured(
    figure: Any, series: Series, account: MemoryAccount, names: list[str], parts: list[str], texts: list[str] | None
) -> None:
    measured = [_most(account, part, "measured") for part in parts]
    figure.add_trace(
        plotly().Bar(
            x=list(range(len(names))),
            y=[None if value is None else value / MIB for value in measured],
            name=series.bar_label.replace("<br>", ", "),
            text=texts,
            textposition="outside",
            marker=pattern(series.colour, _HATCHES[series.index % 2]),
            hovertext=names,
            hovertemplate="%{hovertext} %{y:.2f} MiB<extra></extra>",
        )
    )


def _add_counted(figure: Any, index: int, account: MemoryAccount, parts: list[str]) -> None:
    """A line over each bar; gaps between them are None."""
    xs: list[float | None] = []
    ys: list[float | None] = []
    for at, part in enumerate(parts):
        value = _most(account, part, "counted")
        if value is not None:
            left = at - 0.4 + 0.4 * index
            xs += [left, left + 0.4, None]
            ys += [value / MIB, value / MIB, None]
    line = {"color": INK, "dash": LINES["predicted"], "width": 2}
    figure.add_trace(plotly().Scatter(x=xs, y=ys, mode="lines", name="counted", showlegend=index == 0, line=line))


def _most(account: MemoryAccount, part: str, side: str) -> int | None:
    items = [item for rank in account.ranks if (item := rank.of(part))]
    return max((value for item in items if (value := getattr(item, side)) is not None), default=None)


def _pool(change: Change | None) -> list[str]:
    if change is None:
        return []
    sizes = ["unknown" if value is None else f"{value / MIB:,.0f} MiB" for value in (change.before, change.after)]
    return [f"Not drawn: the KV pool, which takes what the budget leaves, {sizes[0]} and {sizes[1]}."]


def _unmeasured(accounts: list[MemoryAccount]) -> list[str]:
    names = dict.fromkeys(name for account in accounts for name in account.unmeasured)
    return [f"Not measurable on this backend: {', '.join(names)}."] if names else []
