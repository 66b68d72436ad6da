"""Who was last to each collective, how often, and by how much: a straggler has a name.

Only symmetric collectives count, matched by (epoch, group, sequence) over the ranks; instants must be of one clock. A
rank that is last about as often as any other is only unlucky: with n ranks each is expected in a share 1/n.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from labkit.measure.records import StepRecord

if TYPE_CHECKING:
    import pandas as pd

KEYS = ["epoch", "group_id", "seq"]


def stragglers(rows: pd.DataFrame, by_layer: bool = False) -> pd.DataFrame:
    """By axis, phase and rank: `times_last` of the `of` that it took part in, `share`, and how far behind the one
    before it (`behind_us`, p50).

    `lag_us`: the two multiplied, what it costs without its outliers. by_layer: each layer apart (-1: outside the
    layers), since a rank that is late in one of them is last to few of all calls. rows: as `Run.collectives` has them.
    Groups of one member are none.
    """
    calls = rows[~rows["op"].isin(["send", "recv", "barrier"])].sort_values("enter_ns")
    matched = calls.groupby(KEYS, sort=False, observed=True)
    last = matched.tail(1)
    second = matched.nth(-2)[[*KEYS, "enter_ns"]].rename(columns={"enter_ns": "before_ns"})
    both = last.merge(second, on=KEYS)
    both["behind_us"] = (both["enter_ns"] - both["before_ns"]) / 1e3
    among = ["axis", "phase", "layer"] if by_layer else ["axis", "phase"]
    by = [*among, "rank"]
    found = both.groupby(by, observed=True)["behind_us"].agg(times_last="size", behind_us="median").reset_index()
    part = calls.merge(both[KEYS], on=KEYS)  # an axis may have several groups: a rank is late only to its own
    of = part.groupby(by, observed=True).size().rename("of").reset_index()
    found = found.merge(of, on=by)
    found["share"] = found["times_last"] / found["of"]
    found["lag_us"] = found["times_last"] * found["behind_us"]
    ascending = [True] * len(among) + [False]
    return found.sort_values([*among, "share"], ascending=ascending, ignore_index=True)


def critical_path(step: StepRecord, rows: pd.DataFrame) -> list[tuple[int, int, int]]:
    """What a step's end depended on, as (rank, from, to) in ns, first to last: the stretches in which the ranks waited
    for just this one.

    From the end backwards: a rank that waited in a collective waited for the last to enter, so the path goes on there.
    A message that its receiver waited for leads to its sender.
    """
    mine = rows[(rows["epoch"] == step.epoch) & (rows["step_id"] == step.step_id)]
    ends = dict(zip(step.ranks, step.rank_end_ns, strict=True))
    rank = max(ends, key=lambda each: ends[each])
    until, path = ends[rank], []
    starts = dict(zip(step.ranks, step.rank_start_ns, strict=True))
    while True:
        waits = mine[(mine["rank"] == rank) & (mine["wait_ns"] > 0) & (mine["exit_ns"] <= until)]
        if not len(waits):
            path.append((rank, starts[rank], until))
            return path[::-1]
        wait = waits.loc[waits["exit_ns"].idxmax()]
        met = int(wait["enter_ns"] + wait["wait_ns"])
        path.append((rank, met, until))
        others = mine[(mine["group_id"] == wait["group_id"]) & (mine["seq"] == wait["seq"]) & (mine["rank"] != rank)]
        if not len(others):
            path[-1] = (rank, starts[rank], until)
            return path[::-1]
        rank, until = int(others.loc[others["enter_ns"].idxmax()]["rank"]), met


def path_shares(path: Sequence[tuple[int, int, int]]) -> dict[int, float]:
    """Of each rank, its share of the path."""
    total = sum(end - start for _, start, end in path)
    shares: dict[int, float] = {}
    for rank, start, end in path:
        shares[rank] = shares.get(rank, 0.0) + (end - start) / total if total else 0.0
    return shares
