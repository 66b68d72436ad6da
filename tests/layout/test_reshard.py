"""From one layout's KV to another's: every element that a target rank stores comes once, from a rank that has it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from labkit.layout import Layout, Slots, handoff_bytes, kv_heads, layers, passing, require_legal, reshard
from labkit.model.spec import load_spec

SPEC = replace(load_spec("lab-5m"), num_kv_heads=2)
LAYOUTS = ["tp1", "tp2", "tp4", "pp2", "tp4xdcp2", "tp8xdcp4", "pcp2", "pcp2xdcp2", "pp2xtp2", "dp2xtp2",
           "pp4+split=1-2-1-2"]  # fmt: skip
BLOCK = 6


def legal(slug: str) -> Layout:
    layout = Layout.parse(slug)
    require_legal(layout, SPEC)
    return layout


@pytest.mark.parametrize(("source", "target"), list(product(LAYOUTS, LAYOUTS)))
def test_a_target_rank_gets_what_it_stores_once_and_from_one_who_has_it(source: str, target: str) -> None:
    one, other = legal(source), legal(target)
    replica = other.dp - 1
    from_, to = Slots.of(one, BLOCK), Slots.of(other, BLOCK)
    start, stop = 5, 29
    got = {rank: np.zeros((SPEC.num_layers, SPEC.num_kv_heads, stop), int) for rank in other.replica_ranks(replica)}
    for share in reshard(one, other, SPEC, 0, replica):
        assert set(share.layers) <= set(layers(one, SPEC, share.source))
        assert set(share.heads) <= set(kv_heads(one, SPEC, share.source))
        positions = passing(share, from_, to, start, stop)
        assert (from_.members(positions) == one.index_in("dcp", share.source)).all()
        got[share.target][np.ix_(list(share.layers), list(share.heads), positions)] += 1
    for rank, times in got.items():
        stored = to.members(np.arange(stop)) == other.index_in("dcp", rank)
        wanted = np.zeros_like(times)
        mine = np.flatnonzero(stored & (np.arange(stop) >= start))
        wanted[np.ix_(list(layers(other, SPEC, rank)), list(kv_heads(other, SPEC, rank)), mine)] = 1
        assert (times == wanted).all()


def test_copies_share_the_giving() -> None:
    """Two KV heads on four ranks: each head has a copy, and each copy gives."""
    shares = reshard(Layout(tp=4), Layout(tp=4), SPEC)
    assert sorted(share.source for share in shares) == [0, 1, 2, 3]


def test_slots_of_a_member_are_where_the_cache_has_them() -> None:
    slots = Slots.of(Layout.parse("tp4xdcp2"), 8)
    positions = np.arange(20)
    assert slots.members(positions).tolist()[:9] == [0, 0, 0, 0, 1, 1, 1, 1, 0]
    assert slots.slots(positions, np.array([7, 3, 5])).tolist()[:9] == [28, 29, 30, 31, 28, 29, 30, 31, 12]


@pytest.mark.parametrize(("source", "target", "copies"), [("tp1", "tp1", 1), ("tp1", "tp4", 2), ("tp4", "tp1", 1),
                                                         ("pp2", "tp2", 1), ("tp2", "tp4xdcp2", 1)])  # fmt: skip
def test_bytes_are_the_kv_of_the_tokens_times_the_targets_copies(source: str, target: str, copies: int) -> None:
    found = handoff_bytes(legal(source), legal(target), SPEC, 100, block_size=16, dtype_bytes=4)
    once = 2 * SPEC.num_layers * SPEC.num_kv_heads * SPEC.head_dim * 100 * 4
    assert found == once * copies
