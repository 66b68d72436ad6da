"""Percentiles, intervals, and whether there are samples enough for them to mean something.

The percentile is numpy's `linear`: the value at rank (n - 1) q of the sorted samples, interpolated; exact on
the samples, never from buckets. A share comes with its Wilson interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

PERCENTILES = (50, 90, 95, 99)
MIN_BEYOND = 10
"""A percentile with fewer samples beyond it than this is marked as `few`."""

Summary = dict[str, Any]
"""JSON-ready: only dicts, lists, numbers, strings and None."""


def percentile(samples: Sequence[float], q: float) -> float | None:
    """numpy's `linear` percentile; None of nothing. An infinite sample makes what it touches infinite."""
    if not len(samples):
        return None
    ordered = np.sort(np.asarray(samples, np.float64))
    rank = (len(ordered) - 1) * q / 100
    low, high = float(ordered[math.floor(rank)]), float(ordered[math.ceil(rank)])
    if low == high or rank == math.floor(rank):  # also: infinity - infinity and infinity * 0 are no numbers
        return low
    return low + (high - low) * (rank - math.floor(rank))


def few(n: int) -> list[str]:
    """The percentiles that fewer than MIN_BEYOND of n samples lie beyond."""
    return [f"p{q}" for q in PERCENTILES if n * (100 - q) < MIN_BEYOND * 100]


def ladder(samples: Sequence[float] | NDArray[np.float64], num_infinite: int | None = None) -> Summary:
    """{p50, p90, p95, p99, mean, n, few}, and `adjusted` with that many failures as infinite (null.

    Infinite).
    """
    values = np.asarray(samples, np.float64)
    n = len(values)
    steps = np.percentile(values, PERCENTILES, method="linear").tolist() if n else [None] * len(PERCENTILES)
    result: Summary = {f"p{q}": value for q, value in zip(PERCENTILES, steps, strict=True)}
    result |= {"mean": float(values.mean()) if n else None, "n": n, "few": few(n)}
    if num_infinite is not None:
        result["adjusted"] = _adjusted(values.tolist(), num_infinite)
    return result


def _adjusted(samples: list[float], num_infinite: int) -> Summary:
    everything = samples + [math.inf] * num_infinite
    values = {f"p{q}": percentile(everything, q) for q in PERCENTILES}
    finite = {name: None if value is None or math.isinf(value) else value for name, value in values.items()}
    return finite | {"n": len(everything), "num_infinite": num_infinite}


def wilson_interval(hits: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927).

    Honest for few samples and at 0 and 1, where hits/n ± z·s is not.
    """
    if n == 0:
        return 0.0, 1.0
    share, z2 = hits / n, z * z
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)
