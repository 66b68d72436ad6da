"""The arithmetic of a device's ceilings, by numbers worked out by hand."""

from __future__ import annotations

import pytest

from labkit.measure.device import amount, ceilings, row


def test_a_copy_moves_its_bytes_twice_and_a_product_takes_two_side_cubed() -> None:
    assert amount("copy", 1000) == 2000
    assert amount("matmul", 100) == 2_000_000
    with pytest.raises(ValueError, match="'sort' is no work that is measured here; there are copy, matmul"):
        amount("sort", 1)


def test_rates_are_base_10_and_of_the_median_round() -> None:
    found = row("copy", "float32", 10**9, [2 * 10**9, 10**9, 4 * 10**9], wrong=0, together=False, rank=1)
    assert (found["rate"], found["best_rate"], found["time_us"], found["unit"]) == (1.0, 2.0, 2e6, "GB/s")
    assert row("matmul", "bfloat16", 1000, [10**9], wrong=0, together=True)["rate"] == 2.0


def test_alone_is_a_mean_and_together_a_sum() -> None:
    def line(what: str, dtype: str, ns: int, together: bool) -> dict:
        return row(what, dtype, 500, [ns], wrong=0, together=together)

    rows = [line("copy", "float32", 10, False), line("copy", "float32", 20, False)]
    rows += [line("copy", "float32", 20, True), line("copy", "float32", 20, True)]
    rows += [line("matmul", "bfloat16", 10**6, False)]
    found = ceilings(rows)
    assert found["copy_gb_s"] == {"alone": 75.0, "together": 100.0}
    assert found["gflop_s"] == {"bfloat16": {"alone": 250.0, "together": None}}
