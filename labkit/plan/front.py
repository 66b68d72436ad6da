"""The Pareto front of TTFT, TPOT and tokens per GPU: the layouts of which no other is better in one and as good in the
rest. What is not on it loses to something in every way; what is on it is a matter of what one wants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from labkit.plan.candidates import Candidate

Point = tuple[float, float, float]


def pareto_front(candidates: Sequence[Candidate], percentile: str = "p95") -> list[Candidate]:
    """Of those that fit and keep up, ascending by TTFT. Of several that are alike in all three, the first given."""
    points = [(point, one) for one in candidates if (point := _point(one, percentile)) is not None]
    points.sort(key=lambda row: row[0])
    front: list[tuple[Point, Candidate]] = []
    for point, one in points:
        if not any(_as_good(other, point) for other, _ in front):
            front.append((point, one))
    return [one for _, one in front]


def _point(candidate: Candidate, percentile: str) -> Point | None:
    """All three to be made small. None for what does not fit or does not keep up."""
    if candidate.prediction is None or candidate.tokens_per_gpu is None:
        return None
    ttft, tpot = candidate.prediction.ttft_ms[percentile], candidate.prediction.tpot_ms[percentile]
    if not (math.isfinite(ttft) and math.isfinite(tpot)):
        return None
    return ttft, tpot, -candidate.tokens_per_gpu


def _as_good(one: Point, other: Point) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))


def front_row(candidate: Candidate, percentile: str) -> dict[str, Any]:
    assert candidate.prediction is not None
    return {
        "layout": candidate.layout.slug,
        "num_gpus": candidate.num_gpus,
        "ttft_ms": candidate.prediction.ttft_ms[percentile],
        "tpot_ms": candidate.prediction.tpot_ms[percentile],
        "tokens_per_gpu": candidate.tokens_per_gpu,
        "cost_per_million": candidate.cost_per_million,
        "does": candidate.does,
    }
