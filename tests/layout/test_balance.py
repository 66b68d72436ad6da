"""The measured split against every split there is."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from labkit.layout import LayoutError, ModelProfile, PartCost, balance_stages


def every_split(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    if num_stages == 1:
        yield (num_layers,)
        return
    for first in range(1, num_layers - num_stages + 2):
        for rest in every_split(num_layers - first, num_stages - 1):
            yield (first, *rest)


def profile(layers: list[float], embedding: float = 0.0, head: float = 0.0) -> ModelProfile:
    return ModelProfile(PartCost(embedding, 5), tuple(PartCost(s, 10) for s in layers), PartCost(head, 40))


def test_a_heavy_head_takes_layers_from_the_last_stage() -> None:
    balance = balance_stages(profile([1.0] * 10, embedding=0.1, head=4.0), 2)
    assert (balance.split, balance.equal_split) == ((7, 3), (5, 5))
    assert [stage.seconds for stage in balance.stages] == pytest.approx([7.1, 7.0])
    assert (balance.slowest_s, balance.equal_slowest_s) == pytest.approx((7.1, 9.0))
    assert (balance.slowest_stage, balance.option) == (0, "+split=7-3")
    assert balance.gain == pytest.approx(9.0 / 7.1)


def test_no_split_is_faster_and_none_as_fast_is_lighter() -> None:
    draw = random.Random(3)
    for _ in range(60):
        num_layers = draw.randrange(1, 9)
        parts = [PartCost(draw.choice((1.0, 2.0, 3.5)), draw.randrange(1, 50)) for _ in range(num_layers + 2)]
        model = ModelProfile(parts[0], tuple(parts[1:-1]), parts[-1])
        for num_stages in range(1, num_layers + 1):
            balance = balance_stages(model, num_stages)
            assert balance.stages == model.stages(balance.split)
            assert weight(model, balance.split) == min(
                weight(model, split) for split in every_split(num_layers, num_stages)
            )


def weight(model: ModelProfile, split: tuple[int, ...]) -> tuple[float, int]:
    stages = model.stages(split)
    return max(stage.seconds for stage in stages), max(stage.num_bytes for stage in stages)


def test_a_stage_that_memory_forbids_is_not_chosen() -> None:
    """By time 5-5 is best, with 55 and 90 bytes; 80 bytes leave the last stage 4 layers beside its head."""
    model = profile([1.0] * 10)
    assert balance_stages(model, 2).split == (5, 5)
    assert balance_stages(model, 2, memory_bytes=90).split == (5, 5)
    assert balance_stages(model, 2, memory_bytes=89).split == (6, 4)
    assert balance_stages(model, 2, memory_bytes=79).split == (7, 3)


def test_what_cannot_be_split_is_refused_with_the_reason() -> None:
    with pytest.raises(LayoutError, match="3 layers cannot fill 4 stages; pp may be 1 to 3"):
        balance_stages(profile([1.0] * 3), 4)
    with pytest.raises(LayoutError, match=r"fits 60 bytes a stage: the evenest in memory \(7-3\) puts 75"):
        balance_stages(profile([1.0] * 10), 2, memory_bytes=60)
    with pytest.raises(LayoutError, match="split 4-5 does not divide 10 layers"):
        profile([1.0] * 10).stages((4, 5))
