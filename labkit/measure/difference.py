"""How far a percentile of one run is from another's, with an interval, so that noise is not read as a gain.

The two runs had different requests, so each side is resampled by itself (bootstrap over requests). A resample's k-th
smallest value is the sample at floor(n·U), U being the k-th smallest of n uniform numbers, and that is Beta(k, n−k+1)
distributed: drawn directly, a thousand resamples cost as much as a thousand numbers, whatever n is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from labkit.measure.statistics import Summary, few

MIN_SAMPLES = 10
"""On each side, for a difference to be told at all."""
RESAMPLES = 2000
SHOWN = (50, 90, 95)

Values = NDArray[np.float64]


def difference(now: Values, then: Values, q: float, seed: int = 0) -> Summary:
    """{percentile, difference, interval, n, n_then, few, verdict}: percentile q of `now` minus that of `then`.

    verdict: less, more, cannot tell (the 95 % interval holds 0), or too few (either side has under MIN_SAMPLES).
    """
    found: Summary = {"percentile": q, "difference": None, "interval": None, "n": len(now), "n_then": len(then)}
    found["few"] = f"p{q:g}" in few(min(len(now), len(then)))
    if min(len(now), len(then)) < MIN_SAMPLES:
        return found | {"verdict": "too few"}
    rng = np.random.default_rng(seed)
    draws = resampled_percentiles(now, q, rng) - resampled_percentiles(then, q, rng)
    low, high = (float(end) for end in np.percentile(draws, [2.5, 97.5]))
    verdict = "less" if high < 0 else "more" if low > 0 else "cannot tell"
    change = float(np.percentile(now, q) - np.percentile(then, q))
    return found | {"difference": change, "interval": [low, high], "verdict": verdict}


def differences(
    now: dict[str, Values], then: dict[str, Values], percentiles: Sequence[float] = SHOWN
) -> list[Summary]:
    """Of every figure that both sides have, by name."""
    return [
        {"figure": name, **difference(now[name], then[name], q)}
        for name in now
        if name in then
        for q in percentiles
    ]


def resampled_percentiles(samples: Values, q: float, rng: np.random.Generator, size: int = RESAMPLES) -> Values:
    """Percentile q (numpy's `linear`) of `size` resamples of `samples` with replacement, exactly as if each had been
    drawn out and sorted.
    """
    ordered, n = np.sort(samples), len(samples)
    rank = (n - 1) * q / 100
    k = int(rank)
    uniform = rng.beta(k + 1, n - k, size)
    low = ordered[(uniform * n).astype(np.intp).clip(max=n - 1)]
    if k == n - 1 or rank == k:
        return low
    following = uniform + (1 - uniform) * rng.beta(1, n - k - 1, size)
    high = ordered[(following * n).astype(np.intp).clip(max=n - 1)]
    result: Values = low + (high - low) * (rank - k)
    return result
