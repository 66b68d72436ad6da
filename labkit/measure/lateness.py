"""Whom the ranks wait for: a late one by name, or nobody in particular.

A rank counts as late when it is last to an axis's collectives clearly more often than its share of the group; or to
those of one layer, when the ranks wait there longer than everywhere else together. Without
rows of collectives the ranks' own waits speak: the late one waits least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.measure.statistics import wilson_interval
from labkit.measure.stragglers import KEYS, stragglers

if TYPE_CHECKING:
    import pandas as pd

TIMES_ITS_SHARE = 1.5
"""The lower end of the interval of `share` against 1/n: ranks that take turns stay below it."""


def who_is_late(
    rows: pd.DataFrame, phases: Sequence[str], by_rank: Sequence[Mapping[str, Any]]
) -> tuple[str, dict[str, Any]]:
    """A sentence, and {straggler, share, behind_us, wait_by_rank}; `layer` too where it is late in a single one."""
    waits = {row["rank"]: row["wait"] for row in by_rank}
    told = ", ".join(f"rank {rank} {wait:.0%}" for rank, wait in waits.items())
    figures: dict[str, Any] = {"wait_by_rank": waits, "straggler": None}
    spread = f"Waiting by rank, of the window: {told}." if told else ""
    mine = rows[rows["phase"].isin(phases)] if len(rows) else rows
    if not len(mine):
        return f"{spread} No rows of collectives are left to say who was last.".strip(), figures
    found = stragglers(mine)
    if not len(found):
        return spread, figures
    sizes = mine.groupby([*KEYS, "axis"], observed=True).size().groupby("axis", observed=True).max()
    one = _in_one_layer(stragglers(mine, by_layer=True), sizes)
    top = found.loc[found["times_last"].idxmax()] if one is None else one
    axis, rank, share, even = str(top["axis"]), int(top["rank"]), float(top["share"]), 1 / int(sizes[top["axis"]])
    figures |= {"axis": axis, "share": share, "behind_us": float(top["behind_us"])}
    calls = f"the {axis} collectives"
    if one is not None:
        figures["layer"] = int(one["layer"])
        calls += " outside the layers" if one["layer"] < 0 else f" of layer {one['layer']}"
    if _is_late(top, even):
        figures["straggler"] = rank
        behind = f"{top['behind_us']:.0f} µs (median)"
        return f"Rank {rank} is last to {share:.0%} of {calls}, by {behind}. {spread}".strip(), figures
    sentence = f"No rank in particular: the most often last ({rank}) is so in {share:.0%} of {calls}"
    return f"{sentence}, where {even:.0%} would be even. {spread}".strip(), figures


def _is_late(row: pd.Series, even: float) -> bool:
    low, _ = wilson_interval(int(row["times_last"]), int(row["of"]))
    return low > min(TIMES_ITS_SHARE * even, (1 + even) / 2)


def _in_one_layer(found: pd.DataFrame, sizes: pd.Series) -> pd.Series | None:
    """The rank and layer that cost more than all others together, where that rank is late in it."""
    row = found.loc[found["lag_us"].idxmax()]
    is_most = row["lag_us"] > found["lag_us"].sum() / 2
    return row if is_most and _is_late(row, 1 / int(sizes[row["axis"]])) else None
