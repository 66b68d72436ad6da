"""Which layouts there are to choose from: every legal one for a model and a number of ranks, and the refused
ones.

Enumeration runs over the degrees alone; options (sp, ring, split) refine a layout and are not listed.
Nearness is measured in doublings: how far the number of ranks moves, then how far each axis does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from labkit.layout.deployment import Deployment, check_deployment
from labkit.layout.grammar import AXES, LayoutError
from labkit.layout.grid import Layout, dcp_degrees, ep_degrees
from labkit.layout.legality import ENGINE_AXES, check_layout, is_legal, tp_degrees
from labkit.model.shapes import ModelSpec

MAX_NEIGHBOURS = 4
_POOL_SIZES = (1, 2, 4)


def candidate_layouts(num_ranks: int, axes: Sequence[str] = AXES) -> Iterator[Layout]:
    """Every well-formed layout of at most `num_ranks` ranks, degrees on `axes` only, whatever the model."""
    for dp in _degrees("dp", num_ranks, axes):
        for pp in _degrees("pp", num_ranks // dp, axes):
            for pcp in _degrees("pcp", num_ranks // (dp * pp), axes):
                for tp in _degrees("tp", num_ranks // (dp * pp * pcp), axes):
                    yield from _with_reuse(Layout(dp=dp, pp=pp, pcp=pcp, tp=tp), axes)


def deployment_choices(spec: ModelSpec, num_ranks: int, *, engine: bool = False) -> list[Deployment]:
    """Pools with roles that one would try first on so many ranks, smallest first; all of them legal.

    Prefill apart from decode, each by tensor parallelism; and a pool for long prompts, by prefill context
    parallelism, beside one for the others.
    """
    pairs = [(Layout(tp=a), Layout(tp=b)) for a in _POOL_SIZES for b in _POOL_SIZES]
    wanted = [Deployment.of(("prefill", one), ("decode", other)) for one, other in pairs]
    wanted += [Deployment.of(("any", Layout(tp=a)), ("long", Layout(pcp=2))) for a in _POOL_SIZES]
    found = [
        deployment
        for deployment in wanted
        if deployment.world_size <= num_ranks
        and all(answer for _, answer in check_deployment(deployment, spec, num_ranks, engine=engine))
    ]
    return sorted(found, key=lambda deployment: deployment.world_size)


def _degrees(axis: str, most: int, axes: Sequence[str]) -> range:
    return range(1, (most if axis in axes else 1) + 1)


def _with_reuse(grid: Layout, axes: Sequence[str]) -> Iterator[Layout]:
    dcps = dcp_degrees(tp=grid.tp, pcp=grid.pcp, num_kv_heads=1) if "dcp" in axes else (1,)
    eps = ep_degrees(dp=grid.dp, pcp=grid.pcp, tp=grid.tp) if "ep" in axes else (1,)
    for dcp in dcps:
        for ep in eps:
            yield replace(grid, dcp=dcp, ep=ep)


def simplicity(layout: Layout) -> tuple[int, ...]:
    """Sort key: fewer ranks first, then fewer axes in use, then tp before dp before the rest."""
    degrees = [getattr(layout, axis) for axis in ("ep", "dcp", "pcp", "pp", "dp", "tp")]
    return (layout.world_size, sum(d > 1 for d in degrees), *degrees)


def _axes(engine: bool) -> Sequence[str]:
    return ENGINE_AXES if engine else AXES


def legal_layouts(
    spec: ModelSpec, num_ranks: int, *, exact: bool = False, engine: bool = False
) -> list[Layout]:
    """Every legal layout of at most (exact: exactly) `num_ranks` ranks, simplest first; engine: that it also
    runs.
    """
    found = (
        layout
        for layout in candidate_layouts(num_ranks, _axes(engine))
        if (not exact or layout.world_size == num_ranks) and is_legal(layout, spec, num_ranks, engine=engine)
    )
    return sorted(found, key=simplicity)


def refused_layouts(
    spec: ModelSpec, num_ranks: int, *, up_to: int | None = None, engine: bool = False
) -> list[tuple[Layout, str]]:
    """Well-formed layouts of at most `up_to` (default num_ranks) ranks that are refused, each with its
    sentence.
    """
    found = sorted(candidate_layouts(up_to or num_ranks, _axes(engine)), key=simplicity)
    answers = (check_layout(layout, spec, num_ranks, engine=engine) for layout in found)
    return [(answer.layout, str(answer)) for answer in answers if not answer]


# ---- neighbours of a refused layout


def neighbours(
    layout: Layout, spec: ModelSpec, num_ranks: int | None, *, engine: bool = False
) -> tuple[Layout, ...]:
    """The legal layouts nearest to one that is refused, at most four."""
    found = {
        near
        for near in _variations(layout, spec, num_ranks)
        if near != layout and is_legal(near, spec, num_ranks, engine=engine)
    }
    return tuple(sorted(found, key=lambda near: (_distance(layout, near), simplicity(near)))[:MAX_NEIGHBOURS])


def _changed(layout: Layout, **fields: Any) -> Iterator[Layout]:
    """The layout with some fields changed, without what the change no longer carries (dcp, ep, options)."""
    plain = {"dcp": 1, "ep": 1, "sp": False, "ring": False, "split": None}
    for kept in ({}, {"split": None}, plain):
        try:
            yield replace(layout, **{**kept, **fields})
        except LayoutError:
            continue


def _variations(layout: Layout, spec: ModelSpec, num_ranks: int | None) -> Iterator[Layout]:
    """One axis moved, or tp moved and its ranks given to pp or dp instead."""
    most = min(num_ranks or 2 * layout.world_size, 256)
    for axis in AXES:
        for degree in range(1, min(most, 64) + 1):
            yield from _changed(layout, **{axis: degree})
    for tp in tp_degrees(spec, layout.ep == 1):
        for other in ("pp", "dp"):
            spare = max(1, getattr(layout, other) * layout.tp // tp)
            yield from _changed(layout, tp=tp, **{other: spare})
    yield from _shrunk(layout, spec, most)


def _shrunk(layout: Layout, spec: ModelSpec, most: int) -> Iterator[Layout]:
    """Plain dp × tp layouts that fit, for when many things are wrong at once."""
    for tp in tp_degrees(spec):
        if tp <= most:
            yield from _changed(Layout(), tp=tp, dp=max(1, min(layout.dp, most // tp)))


def _distance(a: Layout, b: Layout) -> float:
    moved = sum(abs(math.log2(getattr(a, axis) / getattr(b, axis))) for axis in AXES)
    dropped = sum(getattr(a, option) != getattr(b, option) for option in ("sp", "ring", "split"))
    return abs(math.log2(a.world_size / b.world_size)) + moved + dropped / 4
