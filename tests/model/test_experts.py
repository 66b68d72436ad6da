"""Products over groups of rows: one call or a loop, the same numbers, whatever the groups' sizes."""

from __future__ import annotations

import pytest
import torch

from labkit.layout import WeightSlice
from labkit.model import experts
from labkit.model.checkpoint import Weights
from labkit.model.experts import GroupedExperts, LoopedExperts, grouped_product
from labkit.model.moe import capacity_of, sort_rows, told_of_first

NAMES = [(f"{e}.gate", f"{e}.up", f"{e}.down") for e in range(4)]


class Drawn:
    def read(self, name: str, piece: WeightSlice, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        return torch.randn(piece.shape, generator=generator).to(device, dtype)


def weights(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Weights:
    shapes = {"gate": (24, 16), "up": (24, 16), "down": (16, 24)}
    names = [name for expert in NAMES for name in expert]
    slices = {name: WeightSlice("experts", shapes[name.split(".")[1]], None, 0, 0, None, 1) for name in names}
    return Weights(Drawn(), slices, dtype, torch.device(device))


def by_hand(rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    held, out, at = weights(), [], 0
    for (gate, up, down), count in zip(NAMES, counts, strict=True):
        for row in rows[at : at + count]:
            out.append(held[down] @ (torch.nn.functional.silu(held[gate] @ row) * (held[up] @ row)))
        at += count
    return torch.stack(out) if out else rows.new_empty(0, 16)


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 9], [1, 1, 1, 1], [0, 0, 0, 0]])
@pytest.mark.parametrize("grouped", [True, False])
def test_every_row_passes_its_own_expert(monkeypatch, counts: list[int], grouped: bool) -> None:
    rows = torch.randn(sum(counts), 16, generator=torch.Generator().manual_seed(1))
    want = by_hand(rows, counts)
    if not grouped:
        monkeypatch.setattr(experts, "grouping_works", lambda *asked: False)
    for kind in (LoopedExperts, GroupedExperts):
        got = kind(weights(), NAMES)(rows, torch.tensor(counts))
        assert got.shape == want.shape and torch.allclose(got, want, rtol=1e-4, atol=1e-3)


def test_both_kinds_say_what_they_weigh() -> None:
    for kind in (LoopedExperts, GroupedExperts):
        assert kind(weights(), NAMES).num_bytes == 4 * 3 * 24 * 16 * 4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_that_cannot_group_is_served_by_a_loop(dtype: torch.dtype) -> None:
    """Rows of 4 numbers are not a multiple of 16 bytes in bfloat16: no grouped product takes them."""
    for num_in in (4, 64):
        rows = torch.randn(7, num_in).to("cuda", dtype)
        held = torch.randn(3, 8, num_in).to("cuda", dtype)
        ends = torch.tensor([2, 2, 7], dtype=torch.int32, device="cuda")
        want = torch.cat([rows[:2].float() @ held[0].float().T, rows[2:].float() @ held[2].float().T])
        assert torch.allclose(grouped_product(rows, held, ends).float(), want, rtol=0.05, atol=0.2)


def test_capacity_is_a_multiple_of_an_even_share_rounded_up() -> None:
    assert capacity_of(0.0, 40, 2, 8) == 0, "no limit"
    assert capacity_of(1.0, 40, 2, 8) == 10
    assert capacity_of(1.25, 10, 2, 8) == 4
    assert capacity_of(0.5, 1, 2, 8) == 1, "a token that is alone is always served"
    assert capacity_of(1.0, 0, 2, 8) == 0


def test_the_earliest_rows_of_an_expert_are_kept() -> None:
    rows = sort_rows(torch.tensor([1, 0, 1, 1, 2, 1]), 4, most=2)
    assert rows.order.tolist() == [1, 0, 2, 4] and rows.experts.tolist() == [0, 1, 1, 2]
    assert rows.counts.tolist() == [1, 4, 1, 0] and rows.num_dropped == 2
    back = rows.unsorted(torch.ones(4, 1))
    assert back.flatten().tolist() == [1, 1, 1, 0, 1, 0]


def test_what_is_told_of_the_first_tokens_leaves_the_rows_as_they_are() -> None:
    """Of six tokens four are this rank's to tell: one of expert 1's two drops is among them."""
    experts = torch.tensor([1, 0, 1, 1, 2, 1])
    rows = sort_rows(experts, 4, most=2)
    told = told_of_first(rows, experts[:4].unsqueeze(1), 4)
    assert told.counts.tolist() == [1, 3, 0, 0]
    assert told.num_dropped - told.num_told_elsewhere == 1
    assert told.unsorted(torch.ones(4, 1)).flatten().tolist() == [1, 1, 1, 0, 1, 0]
