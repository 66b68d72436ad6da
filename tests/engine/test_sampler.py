"""One sampler: draws are fixed by seed and position, cuts keep what they say, logprobs are the model's own."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from labkit.engine.messages import SampleSpec
from labkit.engine.sampler import sample, uniform


def logits(rows: int = 1, vocab: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def draw(row: torch.Tensor, count: int, **params: object) -> Counter[int]:
    """Tokens drawn at `count` positions from one row."""
    specs = [SampleSpec(0, position=p, **{"temperature": 1.0, "seed": 7, **params}) for p in range(count)]  # type: ignore[arg-type]
    return Counter(sample(row.expand(count, -1), specs)[0])


def test_temperature_zero_is_the_most_likely_token() -> None:
    x = logits(3)
    assert sample(x, [SampleSpec(i) for i in range(3)]) == (x.argmax(-1).tolist(), None)


@pytest.mark.parametrize("cut", [{}, {"top_k": 10}, {"top_p": 0.9}])
def test_draws_follow_the_distribution(cut: dict[str, object]) -> None:
    row, count = logits(), 20_000
    probabilities = torch.softmax(row[0].double(), -1)
    if "top_k" in cut:
        probabilities[probabilities < probabilities.topk(10).values[-1]] = 0
    if "top_p" in cut:
        ordered, order = probabilities.sort(descending=True)
        ordered[ordered.cumsum(0) - ordered >= 0.9] = 0
        probabilities = torch.zeros_like(probabilities).scatter(0, order, ordered)
    probabilities /= probabilities.sum()
    seen = draw(row, count, **cut)
    assert all(probabilities[token] > 0 for token in seen)
    for token, p in enumerate(probabilities.tolist()):
        assert abs(seen[token] / count - p) < 4 * math.sqrt(p * (1 - p) / count) + 1e-4


def test_a_draw_does_not_depend_on_what_else_is_in_the_batch() -> None:
    x = logits(4)
    specs = [
        SampleSpec(0, temperature=0.7, seed=11, position=3),
        SampleSpec(1, temperature=1.3, seed=12, position=0, top_p=0.8),
        SampleSpec(2),
        SampleSpec(3, temperature=1.0, seed=11, position=4, top_k=5),
    ]
    together = sample(x, specs)[0]
    assert together == [sample(x[i : i + 1], [spec])[0][0] for i, spec in enumerate(specs)]


def test_seed_and_position_fix_the_draw() -> None:
    row = logits(vocab=1000)
    spec = SampleSpec(0, temperature=1.5, seed=1, position=1)
    assert sample(row, [spec]) == sample(row, [spec])
    others = [SampleSpec(0, temperature=1.5, seed=s, position=p) for s in range(6) for p in range(6)]
    assert len(set(sample(row.expand(36, -1), others)[0])) > 10
    assert len({uniform(s, p) for s in range(50) for p in range(50)}) == 2500


def test_top_k_of_one_and_a_tiny_top_p_are_greedy() -> None:
    row = logits()
    best = int(row.argmax())
    assert set(draw(row, 200, top_k=1)) == set(draw(row, 200, top_p=1e-6)) == {best}


def test_top_k_keeps_exactly_k_even_among_equals() -> None:
    assert len(draw(torch.zeros(1, 20), 2000, top_k=4)) == 4


def test_logprobs_are_those_of_the_model_before_temperature() -> None:
    x = logits(2)
    specs = [SampleSpec(0, temperature=9.0, seed=2, logprobs=3), SampleSpec(1, logprobs=0)]
    ids, found = sample(x, specs)
    want = torch.log_softmax(x, -1)
    assert found is not None
    for row, (own, best) in enumerate(found):
        assert own == pytest.approx(float(want[row, ids[row]]), abs=1e-6)
        assert [token for token, _ in best] == want[row].topk(specs[row].logprobs).indices.tolist()
        assert [value for _, value in best] == pytest.approx(want[row].topk(specs[row].logprobs).values.tolist())


def test_half_precision_logits_are_drawn_in_float32() -> None:
    x = logits(vocab=200).bfloat16()
    spec = SampleSpec(0, temperature=1.0, seed=5, logprobs=200)
    assert sample(x, [spec]) == sample(x.float(), [spec])
