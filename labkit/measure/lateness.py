"""Whom the ranks wait for: a late one by name, or nobody in particular.

A rank counts as late when it is last to an axis's collectives clearly more often than its share of the group. Without
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
    """A sentence, and {straggler, share, behind_us, wait_by_rank}."""
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
    top = found.loc[found["times_last"].idxmax()]
    low, _ = wilson_interval(int(top["times_last"]), int(top["of"]))
    axis, rank, share = str(top["axis"]), int(top["rank"]), float(top["share"])
    figures |= {"axis": axis, "share": share, "behind_us": float(top["behind_us"])}
    even = 1 / int(sizes[top["axis"]])
    if low > min(TIMES_ITS_SHARE * even, (1 + even) / 2):
        figures["straggler"] = rank
        behind = f"{top['behind_us']:.0f} µs (median)"
        sentence = f"Rank {rank} is last to {share:.0%} of the {axis} collectives, by {behind}."
        return f"{sentence} {spread}".strip(), figures
    sentence = f"No rank in particular: the most often last ({rank}) is so in {share:.0%} of the {axis} collectives"
    return f"{sentence}, where {even:.0%} would be even. {spread}".strip(), figures
