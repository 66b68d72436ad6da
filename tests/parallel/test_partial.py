"""Partial attention adds up: by torch, by NumPy and unsplit it is the same, whatever the scores and the shares."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from labkit.parallel.partial import (
    Partial,
    attend_each,
    attend_partly,
    empty_partial,
    fused_works,
    merge_partials,
)

K, G, T, L, D = 2, 3, 5, 40, 8


def drawn(seed: int = 0, num_keys: int = L) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(K, G, T, D, generator=generator)
    return queries, *torch.randn(2, K, num_keys, D, generator=generator).unbind(0)


def unsplit(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """float64 [T, K·G, D]."""
    scores = queries.double() @ keys.double().unsqueeze(1).transpose(-1, -2) * D**-0.5
    weights = torch.softmax(scores if mask is None else scores + mask.double(), -1)
    return (weights @ values.double().unsqueeze(1)).flatten(0, 1).transpose(0, 1)


def split(queries: Tensor, keys: Tensor, values: Tensor, cuts: list[int], mask: Tensor | None = None) -> Tensor:
    edges = [0, *cuts, keys.shape[1]]
    parts = [
        attend_partly(queries, keys[:, a:b], values[:, a:b], None if mask is None else mask[:, a:b])
        for a, b in zip(edges, edges[1:], strict=False)
    ]
    return merge_partials(parts).finish()


@pytest.mark.parametrize("cuts", [[], [20], [1], [0], [40], [7, 7, 30], list(range(1, 40))])
def test_any_shares_merge_to_unsplit_attention(cuts: list[int]) -> None:
    torch.testing.assert_close(split(*drawn(), cuts), unsplit(*drawn()).float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("cuts", [[20], [7, 30], [0, 40]])
def test_masked_shares_merge_too_even_where_a_share_shows_a_query_nothing(cuts: list[int]) -> None:
    mask = torch.full((T, L), float("-inf")).triu_(3)  # query t sees keys 0 to t + 2: none of the later shares'
    queries, keys, values = drawn()
    found = split(queries, keys, values, cuts, mask)
    torch.testing.assert_close(found, unsplit(queries, keys, values, mask).float(), atol=1e-5, rtol=0)


Floats = NDArray[np.float64]


def numpy_merge(outs: Floats, sums: Floats, maxima: Floats) -> Floats:
    """The same by hand, in float64: Σ exp(mᵢ − M) wᵢ ÷ Σ exp(mᵢ − M) sᵢ."""
    factors = np.exp(maxima - maxima.max(0))
    return (factors[..., None] * outs).sum(0) / (factors * sums).sum(0)[..., None]


@pytest.mark.parametrize("scale", [1e4, -1e4, 1.0])
def test_scores_of_ten_thousand_do_not_overflow(scale: float) -> None:
    rng = np.random.default_rng(0)
    scores, values = scale + rng.integers(-3, 4, (3, 6, 10)).astype(float), rng.normal(size=(3, 10, D))
    maxima = scores.max(-1)
    weights = np.exp(scores - maxima[..., None])
    parts = [
        Partial(*(torch.tensor(x, dtype=torch.float32) for x in (w @ v, m, w.sum(-1))))
        for w, v, m in zip(weights, values, maxima, strict=True)
    ]
    ours = merge_partials(parts).finish().numpy()
    by_hand = numpy_merge(weights @ values, weights.sum(-1), maxima)
    whole = np.concatenate(list(scores), -1)
    whole = np.exp(whole - whole.max(-1, keepdims=True))
    unsplit = whole / whole.sum(-1, keepdims=True) @ np.concatenate(list(values))
    np.testing.assert_allclose(by_hand, unsplit, atol=1e-12)
    np.testing.assert_allclose(ours, unsplit, atol=1e-5)


def test_one_share_ten_thousand_above_the_other_is_all_that_counts() -> None:
    low, high = (Partial(torch.full((1, 1, D), v), torch.full((1, 1), m), torch.ones(1, 1)) for v, m in
                 ((1.0, -1e4), (2.0, 1e4)))  # fmt: skip
    for parts in ([low, high], [high, low]):
        assert (merge_partials(parts).finish() == 2.0).all()


def test_the_whole_path_takes_scores_of_ten_thousand() -> None:
    queries, keys, values = drawn()
    big = keys * 1e4 / keys.abs().max()
    found = split(queries, big, values, [13, 20])
    assert found.isfinite().all()
    torch.testing.assert_close(found, unsplit(queries, big, values).float(), atol=5e-3, rtol=0)


def test_an_empty_share_merges_as_nothing_and_nothing_alone_gives_zeros() -> None:
    queries, keys, values = drawn()
    some, none = attend_partly(queries, keys, values), empty_partial((T, K * G), D, keys.device)
    assert (none.maximum == float("-inf")).all()
    for parts in ([some, none], [none, some], [none, some, none]):
        torch.testing.assert_close(merge_partials(parts).finish(), some.finish(), atol=1e-6, rtol=0)
    nothing = merge_partials([none, none])
    assert (nothing.finish() == 0).all() and (nothing.maximum == float("-inf")).all()


def test_no_keys_at_all_is_an_empty_share() -> None:
    queries, keys, values = drawn(num_keys=1)
    part = attend_partly(queries, keys[:, :0], values[:, :0])
    assert (part.maximum == float("-inf")).all() and part.weighted.shape == (T, K * G, D)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_causal_is_the_mask_of_a_triangle(dtype: torch.dtype) -> None:
    queries, keys, values = (t.to(dtype) for t in drawn(num_keys=T))
    mask = torch.full((T, T), float("-inf")).triu_(1)
    ours, masked = attend_partly(queries, keys, values, causal=True), attend_partly(queries, keys, values, mask)
    near = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(ours.finish(), masked.finish(), atol=near, rtol=0)


def test_the_kernel_that_gives_log_sums_is_there_and_right() -> None:
    assert fused_works(torch.float32), "this torch lost it: partial attention is plain arithmetic now, and slower"


def test_decodes_of_a_batch_are_attended_each_by_itself() -> None:
    generator = torch.Generator().manual_seed(3)
    queries, lengths = torch.randn(K, 4, G, D, generator=generator), [0, 1, 17, 40]
    keys, values = torch.randn(2, K, 4, L, D, generator=generator).unbind(0)
    mask = torch.zeros(1, 4, 1, L)
    for seq, length in enumerate(lengths):
        mask[:, seq, :, length:] = float("-inf")
    found = attend_each(queries, keys, values, mask)
    for seq, length in enumerate(lengths):
        alone = attend_partly(queries[:, seq].unsqueeze(2), keys[:, seq, :length], values[:, seq, :length])
        mine = Partial(*(t[:, seq].flatten(0, 1) for t in found))
        torch.testing.assert_close(mine.finish(), alone.finish()[0], atol=1e-5, rtol=0)
    assert (found.maximum[:, 0] == float("-inf")).all()
