"""Differences of percentiles between two runs: the shortcut against plain resampling, and what may be said of them."""

from __future__ import annotations

import numpy as np
import pytest

from labkit.measure.difference import difference, differences, resampled_percentiles


@pytest.mark.parametrize(("n", "q"), [(12, 50), (37, 95), (200, 90)])
def test_the_shortcut_draws_what_resampling_would(n: int, q: float):
    rng = np.random.default_rng(3)
    samples = rng.lognormal(3, 0.8, n)
    quick = resampled_percentiles(samples, q, rng, 20_000)
    plain = np.percentile(samples[rng.integers(0, n, (20_000, n))], q, axis=1)
    at = [5, 25, 50, 75, 95]
    assert np.percentile(quick, at) == pytest.approx(np.percentile(plain, at), rel=0.05)
    assert quick.std() == pytest.approx(plain.std(), rel=0.06)


def test_a_shift_is_found_and_its_sign_is_nows_minus_thens():
    then = np.random.default_rng(0).normal(100, 5, 300)
    found = difference(then + 20, then, 50)
    assert found["difference"] == pytest.approx(20) and found["verdict"] == "more"
    low, high = found["interval"]
    assert 15 < low < 20 < high < 25
    assert difference(then - 20, then, 50)["verdict"] == "less"


def test_noise_is_not_read_as_a_gain():
    """Of a hundred pairs of equal runs about five lie outside a 95 % interval."""
    rng = np.random.default_rng(1)
    verdicts = [difference(rng.normal(100, 20, 60), rng.normal(100, 20, 60), 50)["verdict"] for _ in range(100)]
    assert verdicts.count("cannot tell") >= 88


def test_too_few_are_said_to_be_too_few():
    few = difference(np.ones(9), np.ones(500), 50)
    assert few["verdict"] == "too few" and few["difference"] is None and few["interval"] is None
    assert difference(np.ones(150), np.ones(500), 95)["few"], "150 requests have fewer than ten beyond their p95"


def test_only_figures_that_both_have_are_compared():
    one, two = {"ttft_ms": np.arange(20.0), "tpot_ms": np.arange(20.0)}, {"ttft_ms": np.arange(20.0)}
    assert {row["figure"] for row in differences(one, two)} == {"ttft_ms"}
