"""From one layout's KV cache to another's: which rank gives which ranks which heads, layers and positions.

A rank of the target needs, of every request, the layers of its stage, its KV heads, and its share of the positions.
Each piece has one giver. Where several ranks of the source hold copies, those who take are shared out over them. All of
it follows from the two layouts and the model, so both ends know every piece without being told.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.layout.grid import Layout
from labkit.layout.ownership import block_tokens, kv_heads, layers, stored_block
from labkit.model.shapes import ModelSpec

Ints = NDArray[np.int64]


class Share(NamedTuple):
    """What one rank of the source gives one rank of the target, of every request between the same two replicas."""

    source: int
    """Ranks of their own layouts."""
    target: int
    layers: range
    heads: range
    """Of the model, not of the rank."""
    source_member: int
    """Places in the dcp groups: only positions that both store pass between them."""
    target_member: int

    def elements_per_token(self, head_dim: int) -> int:
        """Of each position that passes: keys and values."""
        return 2 * len(self.layers) * len(self.heads) * head_dim


def reshard(
    source: Layout, target: Layout, spec: ModelSpec, source_replica: int = 0, target_replica: int = 0
) -> tuple[Share, ...]:
    """Every share between two replicas, by target rank, then by layers, heads and positions.

    For each target rank they cover what it stores, once.
    """
    givers = source.replica_ranks(source_replica)
    return tuple(
        share
        for index, taker in enumerate(target.replica_ranks(target_replica))
        for share in _shares_of(source, target, spec, givers, taker, index)
    )


def _shares_of(
    source: Layout, target: Layout, spec: ModelSpec, givers: tuple[int, ...], taker: int, index: int
) -> Iterator[Share]:
    wanted_layers, wanted_heads = layers(target, spec, taker), kv_heads(target, spec, taker)
    copies: dict[tuple[int, int, int], list[int]] = {}
    for rank in givers:
        held = layers(source, spec, rank).start, kv_heads(source, spec, rank).start, source.index_in("dcp", rank)
        copies.setdefault(held, []).append(rank)
    for (_, _, member), ranks in sorted(copies.items()):
        some_layers = _common(wanted_layers, layers(source, spec, ranks[0]))
        some_heads = _common(wanted_heads, kv_heads(source, spec, ranks[0]))
        if some_layers and some_heads:
            giver = ranks[index % len(ranks)]
            yield Share(giver, taker, some_layers, some_heads, member, target.index_in("dcp", taker))


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


class Slots(NamedTuple):
    """Where a rank keeps positions of a request: `slots` = block · stored positions of a block + offset."""

    block_size: int
    """Positions of a block over all members of the dcp group."""
    stored: int
    """Of those, on one rank."""

    @classmethod
    def of(cls, layout: Layout, block_size: int) -> Slots:
        return cls(block_tokens(layout, block_size), stored_block(layout, block_size))

    def members(self, positions: Ints) -> Ints:
        """Which member of the dcp group stores each position."""
        return positions % self.block_size // self.stored

    def slots(self, positions: Ints, blocks: Ints) -> Ints:
        """blocks: the request's block table."""
        return blocks[positions // self.block_size] * self.stored + positions % self.stored


def passing(share: Share, source: Slots, target: Slots, start: int, stop: int) -> Ints:
    """The positions of [start, stop) that pass under a share: those that both of its ranks store."""
    positions = np.arange(start, stop)
    given = source.members(positions) == share.source_member
    return positions[given & (target.members(positions) == share.target_member)]


def handoff_bytes(
    source: Layout, target: Layout, spec: ModelSpec, num_tokens: int, *, block_size: int, dtype_bytes: int
) -> int:
    """Bytes that cross from replica to replica for a request of `num_tokens`, over all shares."""
    from_, to = Slots.of(source, block_size), Slots.of(target, block_size)
    return dtype_bytes * sum(
        len(passing(share, from_, to, 0, num_tokens)) * share.elements_per_token(spec.head_dim)
        for share in reshard(source, target, spec)
    )
