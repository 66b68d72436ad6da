"""Which rank stands on which GPU, and which link each axis then crosses: the frequent collectives on the fastest links.

Ranks are numbered tp innermost, then pcp, pp, dp, and stand on GPUs in that order, so that tensor parallelism stays
with neighbours. Whether that is right for this layout is looked at, not assumed: an axis that speaks more often than
another must not stand on the slower link of the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from labkit.layout import AXES, AnyLayout, Layout, StepShape, pools_of
from labkit.layout.traffic import axis_traffic
from labkit.model.shapes import ModelSpec
from labkit.plan.hardware import Hardware, Link
from labkit.said import say

FAST, INSIDE, SOCKETS, ACROSS = range(4)


@dataclass(frozen=True)
class AxisPlace:
    """Where one axis's groups stand. Counts and bytes are of one decode step and of one prefill step."""

    axis: str
    degree: int
    link: str
    """The slowest that one of its groups needs."""
    reach: int
    """0: inside a fast group; 1: inside a node; 2: between its CPU sockets; 3: between nodes."""
    decode_ops: int
    decode_bytes: int
    prefill_ops: int
    prefill_bytes: int


@dataclass(frozen=True)
class RankPlaces:
    layout: AnyLayout
    ranks: tuple[dict[str, Any], ...]
    """For each rank: rank, pool, node, gpu (of the node), and its coordinates."""
    axes: tuple[AxisPlace, ...]
    problem: str = ""
    """Where an axis that speaks often crosses a slower link than one that speaks rarely."""

    def to_dict(self) -> dict[str, Any]:
        return {"ranks": list(self.ranks), "axes": [vars(axis) for axis in self.axes], "problem": self.problem,
                "ok": not self.problem}  # fmt: skip


def reach_of(hardware: Hardware, ranks: tuple[int, ...]) -> int:
    """How far a group of ranks reaches, ranks standing on GPUs in order."""
    first, last = min(ranks), max(ranks)
    per_node = hardware.num_gpus // hardware.num_nodes
    if first // per_node != last // per_node:
        return ACROSS
    if hardware.fast is not None and first // hardware.fast_group == last // hardware.fast_group:
        return FAST
    return SOCKETS if hardware.between_sockets(ranks) else INSIDE


def link_of(hardware: Hardware, reach: int) -> Link:
    found = (hardware.fast, hardware.inside, hardware.sockets, hardware.across)[reach]
    return found or hardware.inside


def axis_reach(layout: Layout, hardware: Hardware, axis: str, first_rank: int = 0) -> int:
    """The farthest that a group of the axis reaches."""
    if getattr(layout, axis) == 1:
        return FAST
    groups = layout.groups(axis)
    return max(reach_of(hardware, tuple(first_rank + rank for rank in group)) for group in groups)


def place_ranks(layout: AnyLayout, spec: ModelSpec, hardware: Hardware, prompt_tokens: int, context: int) -> RankPlaces:
    """Ranks on GPUs in order, what each axis crosses, and whether a frequent one stands on a slower link."""
    rows, axes = [], []
    per_node = hardware.num_gpus // hardware.num_nodes
    for pool in pools_of(layout):
        for rank in range(pool.layout.world_size):
            gpu = pool.first_rank + rank
            rows.append({"rank": gpu, "pool": pool.role, "node": gpu // per_node, "gpu": gpu % per_node,
                         **pool.layout.coords(rank)._asdict()})  # fmt: skip
        axes += _axis_places(pool.layout, spec, hardware, prompt_tokens, context, pool.first_rank)
    return RankPlaces(layout, tuple(rows), tuple(axes), _problem(axes))


def _axis_places(
    layout: Layout, spec: ModelSpec, hardware: Hardware, prompt_tokens: int, context: int, first_rank: int
) -> list[AxisPlace]:
    prefill = StepShape(prefill_tokens=prompt_tokens)
    decode = StepShape(decode_seqs=1, context_tokens=context)
    places = []
    for axis in AXES:
        degree = getattr(layout, axis)
        if degree == 1:
            continue
        reach = axis_reach(layout, hardware, axis, first_rank)
        counts = []
        for shape in (decode, prefill):
            crossings = axis_traffic(axis, layout, spec, shape, 2)
            counts += [sum(c.count for c in crossings), sum(c.wire_bytes(degree) for c in crossings)]
        places.append(AxisPlace(axis, degree, link_of(hardware, reach).kind, reach, *counts))
    return places


def _problem(axes: list[AxisPlace]) -> str:
    for often in axes:
        for seldom in axes:
            if often.decode_ops > seldom.decode_ops > 0 and often.reach > seldom.reach:
                return say(
                    "{often} speaks {n} times a decode step and crosses {slow}, while {seldom} speaks {m} times and "
                    "stays on {fast}.", often=often.axis, n=often.decode_ops, slow=say(often.link), seldom=seldom.axis,
                    m=seldom.decode_ops, fast=say(seldom.link),
                )  # fmt: skip
    return ""


def often_on_slow(layout: Layout, spec: ModelSpec, hardware: Hardware) -> bool:
    """Whether an axis that speaks in every layer of a decode step leaves the fast group."""
    per_layer = [axis for axis in ("tp", "dcp", "ep") if getattr(layout, axis) > 1]
    return any(axis_reach(layout, hardware, axis) != FAST for axis in per_layer)
