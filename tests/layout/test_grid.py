"""Ranks and groups of every layout of up to 16 ranks: groups partition the world, and neighbours are where
they should.
"""

from __future__ import annotations

from collections import Counter

import pytest

from labkit.layout import GROUP_AXES, Coords, Layout, LayoutError, candidate_layouts

WORLDS = list(candidate_layouts(16))


def test_every_world_up_to_16_is_walked() -> None:
    grids = {(w.dp, w.pp, w.pcp, w.tp) for w in WORLDS}
    products = Counter(dp * pp * pcp * tp for dp, pp, pcp, tp in grids)
    # ordered factorisations into four degrees: 1, 4, 10, 20, 35 for a prime's powers 0 to 4
    assert [products[n] for n in (1, 2, 4, 8, 16, 3, 6, 12)] == [1, 4, 10, 20, 35, 4, 16, 40]


@pytest.mark.parametrize("axis", GROUP_AXES)
def test_groups_are_disjoint_and_cover_the_world(axis: str) -> None:
    for layout in WORLDS:
        members = [rank for group in layout.groups(axis) for rank in group]
        assert sorted(members) == list(range(layout.world_size)), layout


@pytest.mark.parametrize("axis", GROUP_AXES)
def test_groups_have_the_axis_degree_and_ascend(axis: str) -> None:
    for layout in WORLDS:
        degree = layout.world_size if axis == "world" else getattr(layout, axis)
        for group in layout.groups(axis):
            assert len(group) == degree, (layout, axis)
            assert list(group) == sorted(group)
        assert [g[0] for g in layout.groups(axis)] == sorted(g[0] for g in layout.groups(axis))


def test_a_ranks_group_is_the_one_that_holds_it() -> None:
    for layout in WORLDS:
        for axis in GROUP_AXES:
            for rank in range(layout.world_size):
                group = layout.group_of(axis, rank)
                assert group in layout.groups(axis)
                assert group[layout.index_in(axis, rank)] == rank


def test_members_of_a_grid_group_differ_on_that_axis_alone() -> None:
    for layout in WORLDS:
        for at, axis in enumerate(("dp", "pp", "pcp", "tp")):
            for group in layout.groups(axis):
                coords = [layout.coords(rank) for rank in group]
                assert [c[at] for c in coords] == list(range(getattr(layout, axis)))
                assert len({c[:at] + c[at + 1 :] for c in coords}) == 1


def test_coordinates_and_ranks_are_inverse() -> None:
    for layout in WORLDS:
        coords = [layout.coords(rank) for rank in range(layout.world_size)]
        assert len(set(coords)) == layout.world_size
        assert [layout.rank_of(c) for c in coords] == list(range(layout.world_size))


def test_tp_is_innermost_then_pcp_then_pp_then_dp() -> None:
    layout = Layout(dp=2, pp=2, pcp=2, tp=2)
    assert layout.group_of("tp", 0) == (0, 1)
    assert layout.group_of("pcp", 0) == (0, 2)
    assert layout.group_of("pp", 0) == (0, 4)
    assert layout.group_of("dp", 0) == (0, 8)


def test_replicas_are_contiguous_and_sample_on_their_last_stages_first_rank() -> None:
    for layout in WORLDS:
        ranks = [layout.replica_ranks(replica) for replica in range(layout.dp)]
        assert [r for replica in ranks for r in replica] == list(range(layout.world_size))
        for replica, members in enumerate(ranks):
            assert {layout.replica_of(rank) for rank in members} == {replica}
            assert layout.coords(layout.sampling_rank(replica)) == Coords(replica, layout.pp - 1, 0, 0)


def test_dcp_reuses_neighbours_in_tp_and_with_pcp_the_copies_across_it() -> None:
    assert Layout(tp=8, dcp=2).groups("dcp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert Layout(pcp=2, tp=4, dcp=2).groups("dcp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert Layout(pcp=2, tp=2, dcp=4, dp=2).groups("dcp") == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_dcp_groups_stay_inside_a_replicas_stage() -> None:
    for layout in WORLDS:
        for group in layout.groups("dcp"):
            assert len({layout.coords(rank)[:2] for rank in group}) == 1


def test_ep_is_inside_a_stage_of_a_replica_or_over_all_replicas_of_it() -> None:
    assert Layout(dp=2, tp=2, ep=2).groups("ep") == ((0, 1), (2, 3))
    assert Layout(dp=2, tp=2, ep=4).groups("ep") == ((0, 1, 2, 3),)
    assert Layout(dp=2, pp=2, tp=1, ep=2).groups("ep") == ((0, 2), (1, 3))
    assert [Layout(dp=2, tp=2, ep=ep).attention_dp for ep in (1, 2, 4)] == [False, False, True]


@pytest.mark.parametrize("rank", [-1, 4, 99])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(LayoutError, match="ranks 0 to 3"):
        Layout(dp=2, tp=2).coords(rank)
    with pytest.raises(LayoutError, match="ranks 0 to 3"):
        Layout(dp=2, tp=2).group_of("tp", rank)


def test_an_unknown_axis_or_place_is_refused() -> None:
    with pytest.raises(LayoutError, match="the axes are dp, pp"):
        Layout(tp=2).groups("tensor")
    with pytest.raises(LayoutError, match="there is no tp 2"):
        Layout(tp=2).rank_of(Coords(0, 0, 0, 2))
