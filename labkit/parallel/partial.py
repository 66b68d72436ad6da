"""Attention over a part of the keys, in a form that can be added up: maximum, sum and weighted values.

Softmax over many keys is a ratio of two sums, Σ exp(s) v and Σ exp(s), so keys may be shared out and each
share summed apart, if all sums are scaled by one maximum: exp(s − max) cannot overflow, whatever the scores.
An empty share has maximum −∞ and weighs nothing. (Milakov & Gimelshein 2018; Dao et al. 2022; a log-sum-exp
is the maximum of a share whose sum is 1.) All of it is float32. Shapes: T queries, H heads, L keys, D head_dim.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from labkit.parallel.comm import Group

NOTHING = float("-inf")


class Partial(NamedTuple):
    """weighted [..., D] = Σ exp(s − maximum) v; maximum [...]; total [...] = Σ exp(s − maximum)."""

    weighted: Tensor
    maximum: Tensor
    total: Tensor

    def at(self, rows: slice | Tensor) -> Partial:
        """Views (or, by an index, copies) of some of the first dimension."""
        return Partial(self.weighted[rows], self.maximum[rows], self.total[rows])

    def finish(self) -> Tensor:
        """Σ exp(s) v ÷ Σ exp(s), float32 [..., D]; a query that saw no key gets 0."""
        return self.weighted / self.total.masked_fill(self.total == 0, 1.0).unsqueeze(-1)


def empty_partial(shape: Sequence[int], head_dim: int, device: torch.device) -> Partial:
    """What `shape` queries make of no keys."""
    weighted, total = torch.zeros(*shape, head_dim, device=device), torch.zeros(*shape, device=device)
    return Partial(weighted, torch.full_like(total, NOTHING), total)


def rescale(maxima: Tensor) -> tuple[Tensor, Tensor]:
    """maxima [parts, ...] → (what each part's sums are multiplied by [parts, ...], the common maximum [...])."""
    maximum = maxima.amax(0)
    return torch.exp(maxima - maximum.masked_fill(maximum == NOTHING, 0.0)), maximum


def merge_partials(partials: Sequence[Partial]) -> Partial:
    """The partial result over all the keys of `partials`, which saw different keys and the same queries."""
    factors, maximum = rescale(torch.stack([part.maximum for part in partials]))
    total = (factors * torch.stack([part.total for part in partials])).sum(0)
    weighted = partials[0].weighted * factors[0].unsqueeze(-1)
    for part, factor in zip(partials[1:], factors[1:], strict=True):
        weighted.addcmul_(part.weighted, factor.unsqueeze(-1))
    return Partial(weighted, maximum, total)


def merge_across(group: Group, partial: Partial, *, scatter: bool) -> Partial:
    """`merge_partials` over the ranks of a group: maxima and sums are gathered, weighted values summed.

    scatter: the first dimension holds the queries of every rank, one rank's after another, and each rank gets
    its own back; otherwise all have the same queries, and all get all.
    """
    stats = group.all_gather(torch.stack([partial.maximum, partial.total]).unsqueeze(0))
    factors, maximum = rescale(stats[:, 0])
    total = (factors * stats[:, 1]).sum(0)
    mine = partial.weighted * factors[group.rank].unsqueeze(-1)
    if not scatter:
        return Partial(group.all_reduce(mine), maximum, total)
    own = (t.chunk(group.size)[group.rank] for t in (maximum, total))
    return Partial(group.reduce_scatter(mine), *own)


def attend_partly(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None, causal: bool = False
) -> Partial:
    """queries [K, G, T, D] of K kv heads, keys and values [K, L, D] → Partial over [T, K·G].

    mask: [T, L], 0 where a query may look and −∞ elsewhere; causal: query t sees the first t + 1 keys (L = T).
    """
    if not keys.shape[1] or not queries.shape[2]:
        num_heads = queries.shape[0] * queries.shape[1]
        return empty_partial((queries.shape[2], num_heads), queries.shape[3], queries.device)
    if mask is None and queries.device.type == "cpu" and fused_works(queries.dtype):
        parts = _fused(queries, keys, values, causal)
    else:
        parts = _plain(queries, keys, values, _causal(queries, keys) if causal else mask)
    return Partial(*(part.flatten(0, 1).transpose(0, 1) for part in parts))


def attend_each(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Partial:
    """One query a sequence: queries [K, S, G, D], keys and values [K, S, L, D], mask [1, S, 1, L] → Partial
    over [K, S, G].
    """
    scores = queries.float() @ keys.float().transpose(-1, -2) * queries.shape[-1] ** -0.5
    return _sums(scores + mask, values)


def _causal(queries: Tensor, keys: Tensor) -> Tensor:
    hidden = torch.full((queries.shape[2], keys.shape[1]), NOTHING, device=queries.device)
    return hidden.triu_(1)


def _plain(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Partial:
    num_kv_heads, group, num_queries, dim = queries.shape
    rows = queries.reshape(num_kv_heads, -1, dim).float()
    scores = (rows @ keys.float().transpose(-1, -2) * dim**-0.5).view(num_kv_heads, group, num_queries, -1)
    sums = _sums((scores if mask is None else scores + mask).flatten(1, 2), values)
    return Partial(*(part.unflatten(1, (group, num_queries)) for part in sums))


def _sums(scores: Tensor, values: Tensor) -> Partial:
    maximum = scores.amax(-1)
    weights = torch.exp(scores - maximum.masked_fill(maximum == NOTHING, 0.0).unsqueeze(-1))
    return Partial(weights @ values.float(), maximum, weights.sum(-1))


def _fused(queries: Tensor, keys: Tensor, values: Tensor, causal: bool) -> Partial:
    """torch's own kernel, with the log-sum-exp that its public face keeps to itself."""
    spread = (t.unsqueeze(1).expand(-1, queries.shape[1], -1, -1) for t in (keys, values))
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, *spread, 0.0, causal)
    return Partial(out.float(), log_sum, torch.ones_like(log_sum))


@functools.cache
def fused_works(dtype: torch.dtype) -> bool:
    """Whether this torch has the kernel for `dtype`, and it gives what plain arithmetic gives."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 3, 5, 8, generator=generator).to(dtype)
    keys, values = torch.randn(2, 2, 5, 8, generator=generator).to(dtype).unbind(0)
    try:
        got = _fused(queries, keys, values, True)
    except (RuntimeError, AttributeError, NotImplementedError, TypeError):
        return False
    want = _plain(queries, keys, values, _causal(queries, keys))
    log_sum = want.maximum + want.total.log()
    near = 1e-5 if dtype == torch.float32 else 0.05
    return torch.allclose(got.maximum, log_sum, atol=near) and torch.allclose(got.weighted, want.finish(), atol=near)
