"""What joins two ranks, as a message sees it: how long a small one takes, and how many bytes a second a large one.

A message goes there and comes back, on one rank's clock: half of that is its way, whoever's clocks differ. Latency is
half the median of small ones, bandwidth (base 10, one way) the size over half the median of large ones. Small: 64
bytes; large: as many as the link carries in some 40 ms, so that a slow one does not take for ever and a fast one has
something to carry.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

SMALL_BYTES = 64
PROBE_BYTES = 64 << 10
LARGEST_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
LONGEST_WAY_S = 0.04
_SHORTEST_S = 1e-7


def pairs_of(num_ranks: int) -> list[tuple[int, int]]:
    """Every two of them once, the lower rank first."""
    return list(combinations(range(num_ranks), 2))


def way_ns(round_trips_ns: Sequence[int]) -> float:
    """Half the median of there-and-back times. Raises ValueError for none."""
    if not round_trips_ns:
        raise ValueError("no message came back: there is nothing to take half of.")
    return float(np.median(round_trips_ns)) / 2


def large_bytes(probe_ns: float, device: str) -> int:
    """The largest PROBE_BYTES · 4^k that goes one way within LONGEST_WAY_S, when PROBE_BYTES took `probe_ns`."""
    size, most = PROBE_BYTES, LARGEST_BYTES[device]
    while size * 4 <= most and size * 4 / PROBE_BYTES * probe_ns <= LONGEST_WAY_S * 1e9:
        size *= 4
    return size


def num_rounds(expected_s: float, budget_s: float, most: int = 20, fewest: int = 3) -> int:
    """So many of `expected_s` each that they fill the budget, within bounds."""
    return max(fewest, min(most, round(budget_s / max(expected_s, _SHORTEST_S))))


def pair_row(
    a: int, b: int, small_ns: Sequence[int], large_ns: Sequence[int], num_bytes: int, *, wrong: int, **more: Any
) -> dict[str, Any]:
    """One pair. small_ns, large_ns: there-and-back times of SMALL_BYTES and of num_bytes; wrong: elements, all told."""
    large = way_ns(large_ns)
    return {
        "a": a,
        "b": b,
        "latency_us": way_ns(small_ns) / 1e3,
        "latency_p90_us": float(np.percentile(small_ns, 90)) / 2e3,
        "bytes": num_bytes,
        "time_us": large / 1e3,
        "bandwidth_gb_s": num_bytes / large,
        "n": len(large_ns),
        "wrong": wrong,
        **more,
    }
