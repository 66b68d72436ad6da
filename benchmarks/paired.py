"""Two clients or two engines held against each other in rounds: the ratio of their medians, with an interval.

A round is one run of either on the same load, one right after the other, so that a machine whose speed drifts drifts
for both. The interval is a bootstrap that draws whole rounds, and within them requests by pairs: requests of one round
share the machine's mood, and an interval over single requests alone would be too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
Rounds = Sequence[NDArray[np.float64]]
"""One array a round, of shape (2, requests): what the first and what the second measured of the same requests."""


def ratio_of_medians(rounds: Rounds, seed: int = 0) -> dict[str, float | list[float]]:
    """{ratio, interval (95 %), medians} of the first over the second, all rounds pooled."""
    pooled = np.concatenate(list(rounds), axis=1)
    rng = np.random.default_rng(seed)
    drawn = [_ratio(_resampled(rounds, rng)) for _ in range(RESAMPLES)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return {
        "ratio": _ratio(pooled),
        "interval": [float(low), float(high)],
        "medians": np.median(pooled, axis=1).tolist(),
        "by_round": [_ratio(one) for one in rounds],
    }


def _ratio(samples: NDArray[np.float64]) -> float:
    first, second = np.median(samples, axis=1)
    return float(first / second)


def _resampled(rounds: Rounds, rng: np.random.Generator) -> NDArray[np.float64]:
    chosen = [rounds[index] for index in rng.integers(0, len(rounds), len(rounds))]
    return np.concatenate([one[:, rng.integers(0, one.shape[1], one.shape[1])] for one in chosen], axis=1)
