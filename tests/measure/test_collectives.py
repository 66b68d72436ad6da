"""Factors and lines by hand."""

from __future__ import annotations

import pytest

from labkit.measure.collectives import OPS, bus_factor, fit, fits, row, sizes


@pytest.mark.parametrize(
    ("op", "num_ranks", "factor"),
    [("all_reduce", 2, 1.0), ("all_reduce", 4, 1.5), ("all_reduce", 8, 1.75), ("all_gather", 4, 0.75),
     ("reduce_scatter", 8, 0.875), ("all_to_all", 2, 0.5), ("broadcast", 8, 1.0), ("sendrecv", 2, 1.0),
     ("ring", 4, 1.0)],
)  # fmt: skip
def test_bus_factors_are_those_of_nccl_tests(op: str, num_ranks: int, factor: float) -> None:
    assert bus_factor(op, num_ranks) == factor


def test_a_row_by_hand() -> None:
    """1 MB in 100 µs are 10 GB/s; over four ranks an all-reduce's bus carries 1.5 times that."""
    found = row("all_reduce", 1_000_000, 4, [90_000, 100_000, 400_000], wrong=0, in_place=True, fabric="shm")
    assert (found["time_us"], found["min_us"], found["algbw_gb_s"], found["busbw_gb_s"]) == (100, 90, 10, 15)
    assert (found["n"], found["wrong"], found["fabric"]) == (3, 0, "shm")


def test_a_line_is_found_again() -> None:
    num_bytes = [64, 4096, 262_144, 16_777_216]
    line = fit(num_bytes, [10 + size / 5e3 for size in num_bytes])
    assert (line.alpha_us, line.gb_per_s) == (pytest.approx(10), pytest.approx(5))
    assert max(map(abs, line.residuals)) < 1e-9 and line.time_us(5000) == pytest.approx(11)


def test_small_messages_weigh_as_much_as_large_ones() -> None:
    """The largest took a tenth too long: the floor is found all the same."""
    num_bytes = [64, 1024, 16_384, 4_194_304]
    took = [10 + size / 1e3 for size in num_bytes]
    line = fit(num_bytes, [*took[:3], took[3] * 1.1])
    assert line.alpha_us == pytest.approx(10, rel=0.03) and max(map(abs, line.residuals)) < 0.1


def test_where_larger_messages_take_no_longer_there_is_no_bandwidth() -> None:
    line = fit([4, 64, 1024], [10.0, 9.9, 9.8])
    assert line.gb_per_s is None and line.alpha_us == pytest.approx(9.9, rel=0.01) and line.time_us(1e9) < 10


def test_a_floor_is_never_negative() -> None:
    assert fit([1000, 2000], [1.0, 3.0]).alpha_us == 0.0


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="two sizes or more; there is 1"):
        fit([64, 64], [1.0, 2.0])
    with pytest.raises(ValueError, match="'reduce' is no collective"):
        bus_factor("reduce", 2)
    with pytest.raises(ValueError, match="at least 4"):
        sizes(2, 8)


def test_sizes_grow_by_the_factor() -> None:
    assert sizes(64, 5000, 4) == [64, 256, 1024, 4096]


def test_fits_are_by_operation_and_place() -> None:
    rows = [row(op, size, 2, [1000 + size], wrong=0, in_place=False) for op in OPS[:2] for size in (64, 4096)]
    assert [(each["op"], each["in_place"]) for each in fits(rows)] == [("all_reduce", False), ("all_gather", False)]
