"""Pools with roles: one string in the shell, in JSON and on the page, on disjoint ranks."""

from __future__ import annotations

import pytest
from cut_models import DENSE

from labkit.layout import Deployment, Layout, LayoutError, check_deployment


@pytest.mark.parametrize(
    ("text", "slug", "name"),
    [
        ("tp2", "tp2", "TP2"),
        ("any:TP2", "tp2", "TP2"),
        ("prefill:tp2, decode:tp1", "prefill:tp2,decode:tp1", "prefill:TP2, decode:TP1"),
        ("any:dp2xtp2,long:pcp2+ring", "any:dp2xtp2,long:pcp2+ring", "any:DP2×TP2, long:PCP2+ring"),
        (
            "Prefill:tp2,any:tp1,decode:tp4",
            "prefill:tp2,any:tp1,decode:tp4",
            "prefill:TP2, any:TP1, decode:TP4",
        ),
    ],
)
def test_written_forms_read_back(text: str, slug: str, name: str) -> None:
    deployment = Deployment.parse(text)
    assert (deployment.slug, str(deployment)) == (slug, name)
    assert Deployment.parse(slug) == Deployment.parse(name) == deployment


def test_pools_take_disjoint_ranks_in_order() -> None:
    deployment = Deployment.parse("prefill:tp2,decode:dp2xtp2")
    assert [pool.ranks for pool in deployment.pools] == [range(0, 2), range(2, 6)]
    assert deployment.world_size == 6
    assert [deployment.pool_of(rank).role for rank in range(6)] == ["prefill"] * 2 + ["decode"] * 4
    with pytest.raises(LayoutError, match="ranks 0 to 5"):
        deployment.pool_of(6)


def test_a_phase_is_served_by_its_own_pool_and_by_those_for_whole_requests() -> None:
    deployment = Deployment.parse("prefill:tp2,decode:tp1,any:tp1")
    assert [pool.role for pool in deployment.serving("prefill")] == ["prefill", "any"]
    assert [pool.role for pool in deployment.serving("decode")] == ["decode", "any"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no layout"),
        ("tp2,tp1", "has no role"),
        ("train:tp2", "the roles are any, prefill, decode, long"),
        ("any:tp2,any:tp1", "stands twice"),
        ("prefill:tp2", "needs a decode pool"),
        ("decode:tp2,any:tp1", "needs a prefill pool"),
        ("long:pcp2", "needs one for the others"),
        ("prefill:tp2,decode:tp", "not an axis with its degree"),
    ],
)
def test_what_cannot_be_deployed_says_why(text: str, says: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Deployment.parse(text)
    assert says in str(caught.value)


def test_each_pool_is_checked_and_ranks_are_counted_over_all_of_them() -> None:
    answers = check_deployment(Deployment.parse("prefill:tp3,decode:tp2"), DENSE, 5)
    assert [bool(legality) for _, legality in answers] == [False, True]
    short = check_deployment(Deployment.parse("prefill:tp2,decode:tp2"), DENSE, 3)
    assert not any(legality for _, legality in short)
    assert all(
        legality for _, legality in check_deployment(Deployment.parse("prefill:tp2,decode:tp2"), DENSE, 4)
    )


def test_a_deployment_of_one_layout_is_that_layout() -> None:
    deployment = Deployment.of(("any", Layout(tp=2)))
    assert deployment == Deployment.parse("tp2")
