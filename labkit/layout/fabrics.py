"""What joins the ranks of a group: the fast fabric where they stand on one node, the slow one where they do not.

`nodes[rank]` is the node of a rank; an empty sequence is one node. The ranks that open a wire and the page that
shows it ask the same function. Shared memory ends at the node, so a group across nodes speaks gloo; NCCL finds its own
way, through NVLink inside a node and through sockets (or InfiniBand) across.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.layout.deployment import AnyLayout, Deployment, pools_of
from labkit.layout.grid import GROUP_AXES

_ACROSS = {"shm": "gloo"}


@dataclass(frozen=True)
class GroupFabric:
    """One group of more than one rank, and what carries it."""

    axis: str
    ranks: tuple[int, ...]
    fabric: str
    """shm, gloo or nccl."""
    spans_nodes: bool


def spans_nodes(ranks: Sequence[int], nodes: Sequence[int]) -> bool:
    return bool(nodes) and len({nodes[rank] for rank in ranks}) > 1


def fabric_of(ranks: Sequence[int], fabric: str, nodes: Sequence[int]) -> str:
    """fabric: what was chosen for the inside of a node."""
    return _ACROSS.get(fabric, fabric) if spans_nodes(ranks, nodes) else fabric


def group_fabrics(layout: AnyLayout, fabric: str, nodes: Sequence[int]) -> list[GroupFabric]:
    """Every group that traffic can cross, in the order of the pools, of the axes and of their groups.

    The ranks between which pools hand KV over are one more, of axis `handoff`.
    """
    groups = [
        (axis, pool.globally(ranks))
        for pool in pools_of(layout)
        for axis in GROUP_AXES
        for ranks in pool.layout.groups(axis)
        if len(ranks) > 1
    ]
    if isinstance(layout, Deployment) and layout.hands_off:
        groups.append(("handoff", layout.handoff_ranks))
    return [
        GroupFabric(axis, ranks, fabric_of(ranks, fabric, nodes), spans_nodes(ranks, nodes)) for axis, ranks in groups
    ]
