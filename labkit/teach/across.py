"""Bytes that leave their node: what was recorded of each group, and the nodes on which its ranks stand.

A message is known to the byte. Of a collective the recorder knows what each rank gave; that it goes round a ring, in
the order of the group, is the usual algorithm and an assumption here (Thakur et al. 2005), as it is in a layout's card.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from labkit.layout import Crossing, Layout

if TYPE_CHECKING:
    import pandas as pd

_KEYS = ["axis", "phase", "op", "group_id", "rank"]


def bytes_across(rows: pd.DataFrame, layout: Layout, nodes: Sequence[int]) -> dict[tuple[str, str, str], float]:
    """(axis, phase, operation) → bytes that all ranks together sent to ranks on other nodes.

    rows: one per collective and rank, as `Run.collectives` has them; nodes: the node of each rank.
    """
    found: dict[tuple[str, str, str], float] = {}
    for (axis, phase, op, group_id, rank), given in rows.groupby(_KEYS, observed=True)["bytes"].sum().items():
        group = layout.groups(axis)[group_id & 0xFFFF]
        found[axis, phase, op] = found.get((axis, phase, op), 0.0) + sent_across(op, int(given), rank, group, nodes)
    return found


def sent_across(op: str, given: int, rank: int, group: Sequence[int], nodes: Sequence[int]) -> float:
    """Of the bytes that `rank` gave to an operation of its group, those that it sends to other nodes."""
    n = len(group)
    following = group[(group.index(rank) + 1) % n]
    if op in ("recv", "barrier"):
        return 0.0
    if op == "send":
        return float(given * (nodes[following] != nodes[rank]))
    if op == "gather":
        return float(given * (nodes[group[0]] != nodes[rank]))
    if op == "all_to_all":
        return given * sum(nodes[other] != nodes[rank] for other in group) / n
    return float(Crossing(op, 1, given, "").wire_bytes(n) * (nodes[following] != nodes[rank]))


def node_map(state: dict[str, Any], ranks_per_node: int) -> Sequence[int]:
    """The node of each rank, as the ranks told it; where they stand on one node, what it would be on two."""
    if len(state["nodes"]) > 1:
        told = {rank: entry["node"] for entry in state["nodes"] for rank in entry["ranks"]}
        return [told[rank] for rank in sorted(told)]
    return [rank // ranks_per_node for rank in range(state["num_ranks"])]
