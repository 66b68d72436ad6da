"""On which node each rank of a pool stands, as the ranks themselves say, and what follows from it.

Ranks of one torchrun node share memory; ranks whose clocks are one can be compared to the nanosecond, others only by
how long the same call took them. Both are asked of the ranks' first messages, never assumed from how they were started.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from labkit.engine.messages import Hello
from labkit.layout import AnyLayout
from labkit.layout.fabrics import group_fabrics


def nodes_of(hellos: Mapping[int, Hello]) -> list[int]:
    """The node of each rank; empty while they all stand on one."""
    nodes = [hellos[rank].node for rank in sorted(hellos)]
    return nodes if len(set(nodes)) > 1 else []


def share_a_clock(hellos: Mapping[int, Hello], device: str) -> bool:
    """Whether wait is told from transfer by the last entry; else by the shortest call of a match."""
    return device == "cpu" and len({hello.clock for hello in hellos.values()}) <= 1


def describe_places(hellos: Mapping[int, Hello], device: str, layout: AnyLayout, fabric: str) -> dict[str, Any]:
    """For the state: `nodes`, each with its host and ranks; `groups`, each with what carries it; `clock`."""
    nodes = nodes_of(hellos)
    ranks_of: dict[int, list[int]] = {}
    for rank in sorted(hellos):
        ranks_of.setdefault(hellos[rank].node, []).append(rank)
    groups = group_fabrics(layout, fabric, nodes) if len(hellos) >= layout.world_size else []
    return {
        "nodes": [
            {"node": node, "host": hellos[ranks[0]].host, "ranks": ranks} for node, ranks in sorted(ranks_of.items())
        ],
        "groups": [dataclasses.asdict(group) for group in groups],
        "clock": "shared" if share_a_clock(hellos, device) else "minimum",
    }
