"""Every fabric gives what one process computes from all ranks' tensors, for every call, dtype and awkward
size.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel import on_ranks
from tests.parallel.on_ranks import SMALL_SLOT_BYTES, numbers
from tests.parallel.team import Team

FABRICS = ("shm", "shm-small", "gloo")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)
ODD = ((1,), (0,), (3, 5), (2, 0, 4), (1023,))
ABOVE_THE_SLOT = (3 * SMALL_SLOT_BYTES // 4 + 13,)
"""Elements of four bytes: three slots and a bit."""

pytestmark = pytest.mark.parametrize("fabric", FABRICS)


def _inputs(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [numbers(rank, shape, dtype) for rank in range(size)]


def _sum(tensors: list[Tensor]) -> Tensor:
    return torch.stack([x.double() for x in tensors]).sum(0)


def _agree(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    if dtype.is_floating_point:
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(got.double(), want.double(), rtol=4 * eps, atol=16 * eps)
    else:
        assert torch.equal(got.double(), want.double())
    assert got.dtype == dtype


def _run(team: Team, function: Any, fabric: str, size: int, *arguments: Any) -> list[Any]:
    return team.run(function, fabric, size, *arguments, ranks=tuple(range(size)))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce_is_the_sum_and_the_same_bits_everywhere(
    team: Team, fabric: str, size: int, dtype: torch.dtype
) -> None:
    for shape in (*ODD, ABOVE_THE_SLOT):
        got = _run(team, on_ranks.all_reduce, fabric, size, shape, dtype)
        _agree(got[0], _sum(_inputs(size, shape, dtype)), dtype)
        for other in got[1:]:
            assert torch.equal(got[0], other)


def test_all_reduce_of_a_view_that_is_not_contiguous(team: Team, fabric: str) -> None:
    for shape in ((3, 5), (70, 50)):
        got = _run(team, on_ranks.all_reduce_of_a_transposed_view, fabric, 3, shape)
        _agree(got[1], _sum(_inputs(3, shape, torch.float32)).t(), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_all_gather_joins_in_rank_order(team: Team, fabric: str, dtype: torch.dtype) -> None:
    for shape, dim in (((3, 5), 0), ((3, 5), 1), ((3, 5), -1), ((90, 50), 1), ((1700,), 0), ((0, 4), 0)):
        got = _run(team, on_ranks.all_gather, fabric, 3, shape, dtype, dim)
        for result in got:
            assert torch.equal(result, torch.cat(_inputs(3, shape, dtype), dim))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_reduce_scatter_gives_each_its_share_of_the_sum(team: Team, fabric: str, dtype: torch.dtype) -> None:
    for shape, dim in (((6, 5), 0), ((5, 6), 1), ((2, 3, 4), 1), ((2100, 3), 0), ((0, 3), 1)):
        got = _run(team, on_ranks.reduce_scatter, fabric, 3, shape, dtype, dim)
        want = _sum(_inputs(3, shape, dtype)).chunk(3, dim)
        for result, part in zip(got, want, strict=True):
            _agree(result, part, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_gather_reaches_the_first_rank_only(team: Team, fabric: str, dtype: torch.dtype) -> None:
    for shape in ((3, 5), (1, 1700), (0,)):
        first, *others = _run(team, on_ranks.gather, fabric, 3, shape, dtype)
        assert others == [None, None]
        for got, want in zip(first, _inputs(3, shape, dtype), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("src", [0, 2])
def test_broadcast_overwrites_the_others(team: Team, fabric: str, src: int) -> None:
    for shape, dtype in (
        ((7,), torch.float32),
        ((1700, 2), torch.bfloat16),
        ((5,), torch.bool),
        ((0,), torch.int8),
    ):
        for result in _run(team, on_ranks.broadcast, fabric, 3, shape, dtype, src):
            assert torch.equal(result, numbers(src, shape, dtype))


@pytest.mark.parametrize(
    "counts",
    [
        [[1, 2, 3], [4, 5, 6], [7, 8, 9]],
        [[0, 0, 700], [0, 0, 0], [1, 0, 0]],
        [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
    ],
    ids=["all", "lopsided, above the slot", "nothing"],
)
def test_all_to_all_takes_parts_of_any_length(team: Team, fabric: str, counts: list[list[int]]) -> None:
    for dtype in (torch.float32, torch.int64):
        got = _run(team, on_ranks.all_to_all, fabric, 3, counts, 4, dtype)
        sent = [on_ranks.parts_for(src, counts, 4, dtype) for src in range(3)]
        for dst, received in enumerate(got):
            for src in range(3):
                assert received[src].dtype == dtype
                assert torch.equal(received[src], sent[src][dst])


@pytest.mark.parametrize("num_floats", [0, 1, 1000, 700_000])
def test_sends_come_before_receives_without_locking_up(team: Team, fabric: str, num_floats: int) -> None:
    got = _run(team, on_ranks.exchange_in_a_ring, fabric, 3, num_floats, 3)
    for rank, received in enumerate(got):
        for i, x in enumerate(received):
            assert torch.equal(x, numbers((rank - 1) % 3, (num_floats,), torch.float32, salt=i))


def test_ranks_that_drift_apart_never_read_a_later_call(team: Team, fabric: str) -> None:
    num_rounds = 60 if fabric == "gloo" else 400
    got = _run(team, on_ranks.a_long_mixture, fabric, 3, num_rounds)
    common = sum(i % 3 + i for i in range(num_rounds)) + sum(3 * i for i in range(0, num_rounds, 7))
    gathered = sum(3 * i for i in range(num_rounds))
    assert got == [common + gathered, common, common]
