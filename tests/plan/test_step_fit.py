"""The fit of measured steps: known prices come back, none is negative, and strange steps are left out."""

from __future__ import annotations

import numpy as np
import pytest

from labkit.plan.step_fit import fit_steps, non_negative_least_squares


def test_least_squares_without_a_bound_in_the_way_are_the_usual_ones():
    rng = np.random.default_rng(0)
    a = rng.random((40, 5))
    x = np.array([1.0, 0.5, 3.0, 0.1, 2.0])
    assert non_negative_least_squares(a, a @ x) == pytest.approx(x)


def test_a_price_that_would_be_negative_is_zero_and_the_others_are_the_best_without_it():
    rng = np.random.default_rng(1)
    a = rng.random((60, 3))
    b = a @ np.array([1.0, -2.0, 4.0])
    found = non_negative_least_squares(a, b)
    assert found[1] == 0 and (found >= 0).all()
    assert found[[0, 2]] == pytest.approx(np.linalg.lstsq(a[:, [0, 2]], b, rcond=None)[0])


def _steps(num: int, noise: float, seed: int = 2) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    features = np.column_stack([np.ones(num), rng.integers(1, 512, num), rng.integers(0, 200_000, num)]).astype(float)
    prices = np.array([8e-3, 4e-4, 5e-8])
    return features, features @ prices * rng.normal(1, noise, num), prices


def test_known_prices_come_back_from_noisy_steps_with_a_residual_that_says_how_sure():
    features, seconds, prices = _steps(600, 0.05)
    fit = fit_steps(features, seconds)
    assert fit.coefficients == pytest.approx(prices, rel=0.05)
    assert (np.abs(fit.coefficients / prices - 1) < 4 * fit.residuals).all()
    assert fit.error == pytest.approx(0.05 * np.sqrt(2 / np.pi), rel=0.15) and abs(fit.bias) < 0.01
    assert fit.num_steps + fit.num_dropped == 600 and fit.num_dropped < 3


def test_steps_in_which_something_else_happened_are_left_out_and_counted():
    features, seconds, prices = _steps(400, 0.02)
    seconds[::20] *= 5
    fit = fit_steps(features, seconds)
    assert fit.num_dropped == 20 and fit.coefficients == pytest.approx(prices, rel=0.03)


def test_too_few_steps_are_refused_with_their_number():
    with pytest.raises(ValueError, match="2 measured steps cannot tell 3 parts"):
        fit_steps(np.ones((2, 3)), np.ones(2))
