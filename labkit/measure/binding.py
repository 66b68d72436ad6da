"""What holds a latency up: the largest group of its parts named, with the figures that say so, or "cannot tell".

A waterfall is the mean over the requests around a percentile, so its parts add up to what those requests saw; single
requests would be noise. A part that is none of the engine's own (lateness, network, delivery) is told as outside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.measure.achieved import Achieved
from labkit.measure.statistics import few

BAND = 0.05
"""Share of the requests, around a percentile, whose mean is its waterfall: one in twenty is like its neighbours."""
DOMINANT = 0.4
"""Of a latency: with less, removing the part altogether would not halve it, and no one thing is to blame."""
MAX_UNTOLD = 0.1
"""Of a latency, in no part: with more, what is untold may outweigh what decides."""
NEAR_ROOF = 0.5
"""Of a measured roof: well-made kernels reach two thirds and more; below half something else holds them up."""

OUTSIDE = ("lateness", "network", "delivery")
GROUPS: dict[str, tuple[str, ...]] = {
    "queue": ("queue",),
    "computing": ("prefill_compute", "compute"),
    "transfer": ("transfer", "handoff"),
    "waiting": ("wait",),
    "outside": OUTSIDE,
}
CANNOT_TELL, MIXED = "cannot tell", "mixed"


@dataclass(frozen=True)
class Waterfall:
    """The parts, in ms, of the requests around percentile `q` of a figure; `few`: too few samples lie beyond it."""

    figure: str
    q: int
    parts: dict[str, float]
    n: int
    few: bool

    @property
    def total_ms(self) -> float:
        return sum(self.parts.values())

    def share(self, *names: str) -> float:
        return sum(self.parts.get(name, 0.0) for name in names) / self.total_ms if self.total_ms else 0.0

    @property
    def title(self) -> str:
        return f"{self.figure}, {'the median' if self.q == 50 else f'p{self.q}'} request"


@dataclass(frozen=True)
class Verdict:
    """`kind`: queue-bound, compute-bound, bandwidth-bound, overhead-bound (own work, and neither roof is near),
    computing (own work, roofs not known), transfer-bound, waiting, outside, mixed, or cannot tell.
    """

    figure: str
    q: int
    kind: str
    sentence: str
    evidence: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.figure} p{self.q}: {self.kind}. {self.sentence}"


def waterfall(figure: str, names: tuple[str, ...], rows: NDArray[np.float64], q: int) -> Waterfall | None:
    """rows: shape (requests, parts), in ms. None of no requests."""
    if not len(rows):
        return None
    means = band_mean(rows, q)
    return Waterfall(figure, q, dict(zip(names, means.tolist(), strict=True)), len(rows), f"p{q}" in few(len(rows)))


def band_mean(rows: NDArray[np.float64], q: float) -> NDArray[np.float64]:
    """Mean of the rows whose sums lie within half a BAND, in ranks, of percentile q; at least the nearest one."""
    order, at = np.argsort(rows.sum(axis=1), kind="stable"), (len(rows) - 1) * q / 100
    half = BAND * len(rows) / 2
    inside = np.abs(np.arange(len(rows)) - at) <= max(half, 0.5)
    mean: NDArray[np.float64] = rows[order[inside]].mean(axis=0)
    return mean


Evidence = Callable[[], tuple[str, Mapping[str, Any]]]
"""A sentence and its figures, worked out only for the verdict that needs them."""


def verdict(
    fall: Waterfall | None, figure: str, q: int, achieved: Achieved | None, why: Mapping[str, Evidence]
) -> Verdict:
    """`why`: group → what else speaks for it."""
    if fall is None:
        return Verdict(figure, q, CANNOT_TELL, "The server told nothing of its requests' parts (a foreign server, or "
                       "another clock), or there is no such request.")  # fmt: skip
    if fall.few:
        return Verdict(figure, q, CANNOT_TELL, f"Too few requests ({fall.n}): fewer than ten lie beyond p{q}.")
    if fall.share("unaccounted") > MAX_UNTOLD or fall.share("unaccounted") < -MAX_UNTOLD:
        return Verdict(figure, q, CANNOT_TELL, f"{fall.share('unaccounted'):.0%} of it is in none of its parts.")
    shares = {group: fall.share(*parts) for group, parts in GROUPS.items()}
    largest = max(shares, key=lambda group: shares[group])
    told = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in _largest(fall))
    if shares[largest] < DOMINANT:
        return Verdict(figure, q, MIXED, f"No part has {DOMINANT:.0%} of it: {told}.", {"shares": shares})
    kind, sentence = _kind(largest, achieved)
    more, figures = why[largest]() if largest in why else ("", {})
    text = " ".join(filter(None, (f"Of {fall.total_ms:.1f} ms: {told}.", sentence, more)))
    return Verdict(figure, q, kind, text, {"shares": shares, **figures})


def _largest(fall: Waterfall) -> list[tuple[str, float]]:
    rows = sorted(((name, fall.share(name)) for name in fall.parts), key=lambda row: -abs(row[1]))
    return [row for row in rows[:3] if abs(row[1]) >= 0.005]


def _kind(group: str, achieved: Achieved | None) -> tuple[str, str]:
    if group != "computing":
        names = {"queue": "queue-bound", "transfer": "transfer-bound", "waiting": "waiting", "outside": "outside"}
        return names[group], "None of it is the engine's." if group == "outside" else ""
    if achieved is None or achieved.read_share is None or achieved.flop_share is None:
        sentence = f"{achieved.sentence()}." if achieved else ""
        untold = "Whether products or memory hold it up cannot be told without the roofs."
        return "computing", f"{sentence} {untold}".strip()
    told = f"Its steps: {achieved.sentence()}."
    if max(achieved.read_share, achieved.flop_share) < NEAR_ROOF:
        why = "small products, launches and Python between them, or cores that other programs use too"
        return "overhead-bound", f"{told} Neither is near: {why}."
    return ("bandwidth-bound" if achieved.read_share >= achieved.flop_share else "compute-bound"), told
