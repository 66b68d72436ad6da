"""From logits to tokens, in one place and on one rank: the chosen ids are what every rank sees next.

A draw is fixed by (seed, position) and by the sequence's own logits, whatever else is in the batch: one
uniform number, hashed from the two, is looked up in the row's cumulative distribution. Rows with top-p or
top-k take theirs over the sorted tokens, rows without over the vocabulary's order, each by its own rule only.
Everything is float32 or wider.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.engine.messages import SampleSpec

Logprobs = tuple[float, list[tuple[int, float]]]

_MASK = (1 << 64) - 1
GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: the division would leave float32."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from the two, by two rounds of splitmix64 (Steele et al. 2014)."""
    state = _splitmix64(_splitmix64(seed & _MASK) ^ (position & _MASK))
    return (state >> 12) / (1 << 52)


def _splitmix64(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def sample(logits: Tensor, specs: Sequence[SampleSpec]) -> tuple[list[int], list[Logprobs] | None]:
    """One token per row of `logits` [len(specs), vocab_size], and logprobs if any spec asks for them.

    Logprobs are of the model's own distribution, before temperature and cuts.
    """
    logits = logits.float()
    chosen = logits.argmax(dim=-1)
    drawn = [row for row, spec in enumerate(specs) if spec.temperature >= GREEDY_BELOW]
    for cut in (False, True):
        rows = [row for row in drawn if _is_cut(specs[row]) is cut]
        if rows:
            draw = _draw_cut if cut else _draw
            chosen[rows] = draw(logits[rows], [specs[row] for row in rows])
    ids = chosen.tolist()
    if all(spec.logprobs < 0 for spec in specs):
        return ids, None
    return ids, _logprobs(logits, ids, specs)


def _is_cut(spec: SampleSpec) -> bool:
    return spec.top_k > 0 or spec.top_p < 1.0


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device).unsqueeze(1)


def _probabilities(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    return torch.softmax(logits / _column([s.temperature for s in specs], logits, torch.float32), dim=-1)


def _look_up(weights: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """Index of the first entry whose cumulative weight exceeds u · total, for each row."""
    cumulative = weights.double().cumsum(dim=-1)
    u = _column([uniform(s.seed, s.position) for s in specs], weights, torch.float64)
    return torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True).squeeze(1)


def _draw(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    return _look_up(_probabilities(logits, specs), specs)


def _draw_cut(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """Keeps the top_k most likely, then the fewest of those whose probability reaches top_p; never none."""
    weights, order = _probabilities(logits, specs).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(weights.shape[1], device=weights.device)
    top_k = _column([s.top_k or weights.shape[1] for s in specs], logits, torch.int64)
    weights = weights.masked_fill(rank >= top_k, 0.0)
    before = weights.double().cumsum(dim=-1) - weights
    top_p = _column([s.top_p for s in specs], logits, torch.float64) * weights.double().sum(-1, keepdim=True)
    weights = weights.masked_fill((before >= top_p) & (rank > 0), 0.0)
    return order.gather(1, _look_up(weights, specs).unsqueeze(1)).squeeze(1)


def _logprobs(logits: Tensor, ids: list[int], specs: Sequence[SampleSpec]) -> list[Logprobs]:
    all_logprobs = torch.log_softmax(logits, dim=-1)
    most = max(0, *(spec.logprobs for spec in specs)) if len(specs) > 1 else max(0, specs[0].logprobs)
    values, tokens = all_logprobs.topk(min(most, logits.shape[1]), dim=-1)
    rows = zip(all_logprobs, ids, tokens.tolist(), values.tolist(), specs, strict=True)
    return [
        (float(row[token]), list(zip(ts[: max(0, spec.logprobs)], vs, strict=False)))
        for row, token, ts, vs, spec in rows
    ]
