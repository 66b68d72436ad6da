"""Which rank stores and which computes a position: each just once, by the position alone, in equal work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.layout import Layout, candidate_layouts, positions, query_positions

BLOCK = 16
DCP_LAYOUTS = [layout for layout in candidate_layouts(16) if layout.dcp > 1 and layout.dp == layout.pp == 1]


def stored(layout: Layout, rank: int, num_tokens: int) -> list[int]:
    return [p for piece in positions(layout, rank, num_tokens, BLOCK) for p in piece]


@pytest.mark.parametrize(
    "num_tokens", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 8 * BLOCK - 1, 8 * BLOCK, 8 * BLOCK + 1, 999]
)
def test_each_position_is_stored_once_in_its_dcp_group(num_tokens: int) -> None:
    for layout in DCP_LAYOUTS:
        for group in layout.groups("dcp"):
            everyone = sorted(p for rank in group for p in stored(layout, rank, num_tokens))
            assert everyone == list(range(num_tokens)), layout


@given(st.sampled_from(DCP_LAYOUTS), st.integers(0, 600), st.integers(0, 600))
def test_a_growing_sequence_never_moves_what_is_stored(layout: Layout, before: int, more: int) -> None:
    for rank in layout.group_of("dcp", 0):
        assert stored(layout, rank, before + more)[: len(stored(layout, rank, before))] == stored(
            layout, rank, before
        )


def test_a_short_sequence_leaves_a_member_an_empty_share() -> None:
    assert [stored(Layout(tp=2, dcp=2), rank, 3) for rank in range(2)] == [[0, 1, 2], []]


def test_without_dcp_every_rank_stores_every_position() -> None:
    for rank in range(4):
        assert stored(Layout(pcp=2, tp=2), rank, 40) == list(range(40))


@given(st.integers(1, 8), st.integers(0, 500))
def test_every_query_of_a_prefill_is_computed_once(pcp: int, num_tokens: int) -> None:
    layout = Layout(pcp=pcp, tp=2)
    for tp in range(2):
        group = [rank for rank in range(layout.world_size) if layout.coords(rank).tp == tp]
        everyone = sorted(
            p for rank in group for piece in query_positions(layout, rank, num_tokens) for p in piece
        )
        assert everyone == list(range(num_tokens))


@given(st.integers(2, 8), st.integers(64, 500))
def test_pcp_ranks_see_about_equally_many_keys(pcp: int, num_tokens: int) -> None:
    """A query at position p sees p + 1 keys; an early chunk with a late one evens that out within a chunk."""
    layout = Layout(pcp=pcp)
    seen = [sum(p + 1 for c in query_positions(layout, r, num_tokens) for p in c) for r in range(pcp)]
    assert max(seen) - min(seen) <= 2 * num_tokens
    contiguous = [sum(range(r * num_tokens // pcp, (r + 1) * num_tokens // pcp)) for r in range(pcp)]
    assert max(seen) <= max(contiguous)
