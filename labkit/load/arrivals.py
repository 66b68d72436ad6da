"""When requests arrive: gaps drawn in units of the mean gap, so that a rate is a stretch of time and nothing
else.

Gaps ~ Gamma(b, 1/b): mean 1, coefficient of variation 1/sqrt(b); b = 1 is Poisson, b -> infinity constant.
Divided by a rate they are Gamma(b, 1/(b*rate)). Because the draw does not know the rate, one seed gives the
same requests in the same order at every rate, and a live run can change its rate without drawing anew.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from labkit.load.workload import Arrival

_BLOCK = 256
"""Gaps drawn at a time, by finite and endless schedules alike: the stream does not depend on its length."""


def unit_gaps(arrival: Arrival, rng: np.random.Generator) -> Iterator[float]:
    """Endless gaps with mean 1 (all 0 for a burst); the first is the wait before the first arrival."""
    while True:
        yield from _block(arrival, rng).tolist()


def _block(arrival: Arrival, rng: np.random.Generator) -> np.ndarray:
    if arrival.process == "burst":
        return np.zeros(_BLOCK)
    if arrival.process == "constant":
        return np.ones(_BLOCK)
    shape = 1.0 if arrival.process == "poisson" else arrival.burstiness
    return rng.gamma(shape, 1.0 / shape, _BLOCK)
