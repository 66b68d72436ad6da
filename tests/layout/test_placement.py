"""Experts on ranks by load: nothing is lost, nothing twice on a rank, and the busiest rank has less to do."""

from __future__ import annotations

import random

import pytest

from labkit.layout import (
    Layout,
    LayoutError,
    check_placement,
    imbalance,
    place_experts,
    plain_placement,
    rank_loads,
    weight_slices,
)
from labkit.model.spec import load_spec


def test_plain_order_is_contiguous_and_may_be_uneven() -> None:
    assert plain_placement(5, 2) == ((0, 1, 2), (3, 4))
    sizes = [len(experts) for experts in plain_placement(256, 3)]
    assert sizes == [86, 85, 85]


def test_the_most_loaded_experts_are_spread() -> None:
    load = [90, 80, 70, 60, 1, 2, 3, 4]
    assert imbalance(plain_placement(8, 4), load) == pytest.approx(170 * 4 / 310)
    placed = place_experts(load, 4)
    assert [sum(expert < 4 for expert in held) for held in placed] == [1, 1, 1, 1]
    assert [len(held) for held in placed] == [2, 2, 2, 2]
    assert imbalance(placed, load) < 1.2


def test_copies_go_to_the_most_loaded_and_share_its_tokens() -> None:
    load = [600, 10, 10, 10]
    placed = place_experts(load, 2, num_copies=2)
    assert all(0 in held for held in placed), "one expert that is nearly everything is on both ranks"
    assert rank_loads(placed, load) == [pytest.approx(315, abs=10)] * 2
    assert imbalance(place_experts(load, 2), load) > 1.9


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_every_expert_has_an_owner_no_rank_holds_one_twice_and_slots_are_even(num_ranks: int) -> None:
    draw = random.Random(num_ranks)
    for num_experts in (5, 8, 60, 128):
        for num_copies in {0, min(3, num_experts * (num_ranks - 1)), num_experts * (num_ranks - 1)}:
            if num_ranks > num_experts + num_copies:
                continue
            load = [int(1000 * draw.random() ** 4) for _ in range(num_experts)]
            placed = place_experts(load, num_ranks, num_copies)
            check_placement(placed, num_experts, num_ranks)
            sizes = [len(held) for held in placed]
            assert max(sizes) - min(sizes) <= 1 and sum(sizes) == num_experts + num_copies
            assert all(len(set(held)) == len(held) for held in placed)
            assert sum(rank_loads(placed, load)) == pytest.approx(sum(load))
            if not num_copies and num_experts >= 60:
                assert imbalance(placed, load) <= imbalance(plain_placement(num_experts, num_ranks), load)


@pytest.mark.parametrize(
    ("load", "num_ranks", "num_copies", "sentence"),
    [
        ([1, 1], 3, 0, "take 1 to 2 ranks"),
        ([1, 1], 2, 3, "room for 0 to 2"),
        ([1, -1], 2, 0, "cannot be negative"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_the_numbers(load, num_ranks, num_copies, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        place_experts(load, num_ranks, num_copies)


def test_a_placement_is_checked_by_the_experts_number() -> None:
    with pytest.raises(LayoutError, match="no rank owns expert 2"):
        check_placement(((0, 1), (3,)), 4, 2)
    with pytest.raises(LayoutError, match="expert 9 is placed"):
        check_placement(((0, 1), (2, 3, 9)), 4, 2)
    with pytest.raises(LayoutError, match="ep group of 4"):
        check_placement(((0, 1), (2, 3)), 4, 4)


def test_a_rank_loads_the_experts_that_it_was_given() -> None:
    spec, layout = load_spec("lab-moe-8x"), Layout(tp=2, ep=2)
    placements = (((0, 2, 4, 6), (1, 3, 5, 7)), ())
    for rank, (placed, plain) in enumerate(zip(placements[0], plain_placement(8, 2), strict=True)):
        names = weight_slices(layout, spec, rank, placements)
        for layer, held in ((0, placed), (1, plain), (3, plain)):
            found = {int(name.split(".")[5]) for name in names if f"layers.{layer}." in name and ".experts." in name}
            assert found == set(held)
