"""Who holds what: for one rank, each part of the model and the KV cache, which slice of it, and how many
copies exist.

A part is partitioned when other ranks hold other slices of it, replicated when every rank that has it has the
same. KV is never a copy across replicas: two replicas serve different requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from labkit.layout.deployment import AnyLayout, pools_of
from labkit.layout.grid import Layout
from labkit.layout.ownership import is_first_stage, is_last_stage, kv_heads
from labkit.layout.slices import rank_memory
from labkit.model.shapes import ModelSpec
from labkit.model.tensors import EMBEDDING, EXPERTS, HEAD, NORM, PARTS, ROUTER

KV = "kv"
PARTITIONED, REPLICATED = "partitioned", "replicated"


@dataclass(frozen=True, slots=True)
class Holding:
    """Slice `index` of `of` distinct slices of a part; `copies` ranks hold this same one.

    Each further pool of a deployment holds it once more, however it is cut there.
    """

    part: str
    kind: str
    index: int
    of: int
    copies: int
    bytes: int


def _signature(layout: Layout, spec: ModelSpec, rank: int, part: str) -> tuple[int, ...] | None:
    """What tells one slice of a part from another; None when the rank holds none of it."""
    at = layout.coords(rank)
    if part == EMBEDDING:
        return (at.tp,) if is_first_stage(layout, rank) else None
    if part == HEAD:
        return (at.tp,) if is_last_stage(layout, rank) else None
    if part == KV:
        return (at.dp, at.pp, kv_heads(layout, spec, rank).start, layout.index_in("dcp", rank))
    if part in (NORM, ROUTER):
        return (at.pp,)
    if part == EXPERTS and layout.ep > 1:
        return (at.pp, layout.index_in("ep", rank))
    return (at.pp, at.tp)


def _holding(layout: Layout, spec: ModelSpec, rank: int, part: str, num_bytes: int) -> Holding:
    everyone = [_signature(layout, spec, other, part) for other in range(layout.world_size)]
    distinct = list(dict.fromkeys(s for s in everyone if s is not None))
    mine = everyone[rank]
    if mine is None:
        raise ValueError(f"rank {rank} of {layout} holds nothing of {part}.")
    copies = everyone.count(mine)
    kind = REPLICATED if len(distinct) == 1 and copies > 1 else PARTITIONED
    return Holding(part, kind, distinct.index(mine), len(distinct), copies, num_bytes)


def holdings(
    layout: AnyLayout, spec: ModelSpec, rank: int, dtype_bytes: int, kv_bytes: int | None = None
) -> list[Holding]:
    """What `rank` holds, part by part, weights in bytes; with `kv_bytes` (what its cache takes) the KV cache
    too. Pools serve different requests with the same weights.
    """
    pools = pools_of(layout)
    pool = next(pool for pool in pools if rank in pool.ranks)
    found = _holdings(pool.layout, spec, rank - pool.first_rank, dtype_bytes, kv_bytes)
    return [_beside(each, len(pools) - 1) for each in found] if len(pools) > 1 else found


def _beside(held: Holding, num_others: int) -> Holding:
    if held.part == KV:
        return held
    return replace(held, copies=held.copies + num_others, kind=REPLICATED if held.of == 1 else held.kind)


def _holdings(
    layout: Layout, spec: ModelSpec, rank: int, dtype_bytes: int, kv_bytes: int | None
) -> list[Holding]:
    memory = rank_memory(layout, spec, rank, dtype_bytes)
    found = [_holding(layout, spec, rank, part, memory[part]) for part in PARTS if part in memory]
    if kv_bytes is not None:
        found.append(_holding(layout, spec, rank, KV, kv_bytes))
    return found
