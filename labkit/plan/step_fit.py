"""Fit what a step costs as a sum of parts, none of which may be negative, to steps that were measured.

Time is work: a part that would earn time back has been fitted to noise. So the least squares are non-negative
(Lawson and Hanson 1974, chapter 23), of relative errors, and steps in which the machine did something else are left
out by a stated rule. Each coefficient has a residual: how far it moves when other steps of the same kind are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

OUTLIER = 0.25
"""A step further than this (or six times the usual distance, whichever is more) from the fit is left out."""
_SPREADS, _ROUNDS, _DRAWS = 6.0, 5, 24


@dataclass(frozen=True)
class Fit:
    """coefficients [k]; residuals [k]: of each, its standard deviation over redrawn steps ÷ its value."""

    coefficients: Floats
    residuals: Floats
    error: float
    """Mean absolute relative error over the steps that were kept."""
    bias: float
    """Predicted ÷ measured over the steps that were kept, sums of both, less 1."""
    num_steps: int
    num_dropped: int


def non_negative_least_squares(a: Floats, b: Floats) -> Floats:
    """x ≥ 0 with the least |a x − b|. a [n, k], b [n]."""
    num = a.shape[1]
    x, active = np.zeros(num), np.zeros(num, bool)
    tolerance = 1e-10 * float(np.abs(a).max(initial=1.0) * np.abs(b).max(initial=1.0)) * len(b)
    for _ in range(6 * num):
        gradient = a.T @ (b - a @ x)
        gradient[active] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        active[best] = True
        x = _inside(a, b, x, active)
    return x


def _inside(a: Floats, b: Floats, x: Floats, active: NDArray[np.bool_]) -> Floats:
    """The best x over the active columns, with those dropped (from `active` too) that would turn negative."""
    while True:
        wanted = np.zeros_like(x)
        wanted[active] = np.linalg.lstsq(a[:, active], b, rcond=None)[0]
        below = active & (wanted <= 0)
        if not below.any():
            return wanted
        step = np.min(x[below] / np.maximum(x[below] - wanted[below], 1e-300))
        x = x + step * (wanted - x)
        active[active & (x <= 1e-15 * max(1e-300, float(x.max())))] = False
        x[~active] = 0.0
        if not active.any():
            return x


def fit_steps(features: Floats, seconds: Floats, draws: int = _DRAWS, seed: int = 0) -> Fit:
    """features [n, k], seconds [n], both of measured steps. Raises ValueError for fewer steps than parts."""
    num, parts = features.shape
    if num < parts:
        raise ValueError(
            f"{num} measured steps cannot tell {parts} parts of their cost apart: measure at least {parts}."
        )
    coefficients, kept = _robust(features, seconds)
    predicted = features[kept] @ coefficients
    redrawn = _redrawn(features[kept], seconds[kept], draws, np.random.default_rng(seed))
    with np.errstate(divide="ignore", invalid="ignore"):
        residuals = np.where(coefficients > 0, redrawn.std(axis=0) / coefficients, 0.0)
    return Fit(
        coefficients,
        residuals,
        float(np.abs(predicted / seconds[kept] - 1).mean()),
        float(predicted.sum() / seconds[kept].sum() - 1),
        int(kept.sum()),
        int(num - kept.sum()),
    )


def _robust(features: Floats, seconds: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    kept = np.ones(len(seconds), bool)
    scale = seconds
    coefficients = np.zeros(features.shape[1])
    for _ in range(_ROUNDS):
        # errors relative to the fit, not to the measured: else a slow step would count less than a quick one
        coefficients = _solve(features[kept], seconds[kept], scale[kept])
        predicted = np.maximum(features @ coefficients, 1e-12)
        ratio = seconds / predicted
        centre = float(np.median(ratio))
        spread = float(np.median(np.abs(ratio - centre))) * 1.4826
        kept = np.abs(ratio - centre) <= max(OUTLIER, _SPREADS * spread)
        scale = predicted
    return _solve(features[kept], seconds[kept], scale[kept]), kept


def _solve(features: Floats, seconds: Floats, scale: Floats) -> Floats:
    weighted = features / scale[:, None]
    sizes = np.maximum(np.abs(weighted).max(axis=0), 1e-300)  # columns of like size: tokens beside millions of pairs
    return non_negative_least_squares(weighted / sizes, seconds / scale) / sizes


def _redrawn(features: Floats, seconds: Floats, draws: int, rng: np.random.Generator) -> Floats:
    """[draws, k]: the coefficients of as many steps, drawn with replacement."""
    found = [np.zeros(features.shape[1])]
    for _ in range(draws):
        rows = rng.integers(len(seconds), size=len(seconds))
        found.append(_solve(features[rows], seconds[rows], seconds[rows]))
    return np.array(found[1:] or found)
