"""Packed and plain products agree; a row-parallel layer adds its bias once; shards recombine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from labkit.model import linear
from labkit.model.linear import Linear, RowParallel, packing_works
from labkit.parallel.sequence import ResidualStream

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from thread_ranks import on_threads, thread_groups


def normals(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 7, 130])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_product_equals_plain_arithmetic(rows: int, with_bias: bool) -> None:
    weight, x, residual = normals(96, 64), normals(rows, 64, seed=1), normals(rows, 96, seed=2)
    bias = normals(96, seed=3) if with_bias else None
    for layer in (Linear(weight, bias), Linear(weight, bias, pack=False)):
        want = F.linear(x, weight, bias)
        assert torch.allclose(layer(x), want, atol=1e-4)
        assert torch.allclose(layer.plus(x, residual), want + residual, atol=1e-4)


def test_inputs_are_left_as_they_were() -> None:
    x, residual = normals(2, 64, seed=1), normals(2, 96, seed=2)
    kept = x.clone(), residual.clone()
    for pack in (True, False):
        Linear(normals(96, 64), pack=pack).plus(x, residual)
    assert torch.equal(x, kept[0]) and torch.equal(residual, kept[1])


def test_a_machine_without_packed_products_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(weight: torch.Tensor) -> torch.Tensor:
        raise AttributeError("no such operator")

    packing_works.cache_clear()
    monkeypatch.setattr(linear, "_pack", missing)
    try:
        assert not packing_works(torch.float32)
        layer, x = Linear(normals(96, 64)), normals(3, 64)
        assert not layer.weight.is_mkldnn and torch.equal(layer(x), F.linear(x, layer.weight))
    finally:
        packing_works.cache_clear()


def test_a_packed_product_that_is_wrong_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    packing_works.cache_clear()
    monkeypatch.setattr(linear, "_packed_product", lambda x, w, b, r: x.new_zeros(len(x), w.shape[0]))
    try:
        assert not packing_works(torch.float32)
    finally:
        packing_works.cache_clear()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_row_parallel_bias_is_added_once_after_the_reduction(tp: int) -> None:
    weight, bias, x, residual = normals(24, 32), normals(24, seed=1), normals(5, 32, seed=2), normals(5, 24, seed=3)
    columns = 32 // tp

    def member(rank: int) -> torch.Tensor:
        mine = slice(rank * columns, (rank + 1) * columns)
        return RowParallel(weight[:, mine], bias, ResidualStream(groups[rank])).plus(x[:, mine].contiguous(), residual)

    groups = thread_groups(tp)
    want = F.linear(x, weight, bias) + residual
    for got in on_threads([lambda rank=rank: member(rank) for rank in range(tp)]):
        assert torch.allclose(got, want, atol=1e-5)


def test_bytes_are_those_of_one_copy() -> None:
    assert Linear(normals(96, 64), normals(96)).num_bytes == 4 * (96 * 64 + 96)
