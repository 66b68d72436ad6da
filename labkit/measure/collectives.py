"""What a collective costs, as nccl-tests tells it: time by size, algorithm and bus bandwidth, and a line through them.

Bandwidths are base-10 (1 GB = 10⁹ bytes). The bus bandwidth multiplies the algorithm's by what the hardware has to
carry for each byte of the result, so that it can be held against a link's, whatever the number of ranks; the factors
are those of nccl-tests' PERFORMANCE.md. The line is t = α + bytes ÷ β: α the latency floor, β the bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "sendrecv", "ring")
"""sendrecv: the first rank to the second; ring: every rank to the next one, all at once."""
PINGPONG = "pingpong"
"""Between two ranks, there and back: half of it is a message's way, whatever their clocks (`labkit.measure.pairs`)."""
BOTH_PLACES = ("all_reduce", "broadcast")
"""Operations that can also write over their input; the others have an output of another shape."""


def bus_factor(op: str, num_ranks: int) -> float:
    """Bus bandwidth ÷ algorithm bandwidth. Raises ValueError for an operation that is not among OPS.

    all_reduce 2(n−1)/n; all_gather, reduce_scatter and all_to_all (n−1)/n; broadcast, sendrecv and ring 1. The size
    is that of the whole buffer: what all_gather gives, what reduce_scatter takes.
    """
    if op not in OPS:
        raise ValueError(f"{op!r} is no collective that is measured here; there are {', '.join(OPS)}.")
    shared = (num_ranks - 1) / num_ranks
    return {"all_reduce": 2 * shared, "all_gather": shared, "reduce_scatter": shared, "all_to_all": shared}.get(op, 1.0)


def sizes(smallest: int, largest: int, factor: int = 4) -> list[int]:
    """Bytes from smallest to largest, each `factor` times the one before. Raises ValueError."""
    if not 4 <= smallest <= largest or factor < 2:
        raise ValueError(
            f"sizes from {smallest} to {largest} bytes in steps of {factor}: the smallest must be at least 4 and at "
            f"most the largest, and the factor at least 2."
        )
    found = [smallest]
    while found[-1] * factor <= largest:
        found.append(found[-1] * factor)
    return found


def row(
    op: str, num_bytes: int, num_ranks: int, times_ns: Sequence[int], *, wrong: int, in_place: bool, **more: Any
) -> dict[str, Any]:
    """One line of the table. times_ns: of each repetition, the slowest rank's; the bandwidths are of their median."""
    took = np.asarray(times_ns, np.float64)
    median_ns = float(np.median(took))
    algbw = num_bytes / median_ns  # bytes a nanosecond are GB/s
    return {
        "op": op,
        "bytes": num_bytes,
        "ranks": num_ranks,
        "in_place": in_place,
        "time_us": median_ns / 1e3,
        "min_us": float(took.min()) / 1e3,
        "p90_us": float(np.percentile(took, 90)) / 1e3,
        "algbw_gb_s": algbw,
        "busbw_gb_s": algbw * bus_factor(op, num_ranks),
        "n": len(took),
        "wrong": wrong,
        **more,
    }


@dataclass(frozen=True)
class Line:
    """t = alpha_us + bytes ÷ (1000 · gb_per_s) microseconds."""

    alpha_us: float
    gb_per_s: float | None
    """None where larger messages took no longer: the sizes were too small to see a bandwidth."""
    residuals: tuple[float, ...]
    """Of each size, (measured − line) ÷ measured."""

    def time_us(self, num_bytes: float) -> float:
        return self.alpha_us + (num_bytes / (1e3 * self.gb_per_s) if self.gb_per_s else 0.0)

    def to_dict(self) -> dict[str, Any]:
        worst = max(map(abs, self.residuals), default=0.0)
        return {"alpha_us": self.alpha_us, "gb_per_s": self.gb_per_s, "worst_residual": worst}


def fit(num_bytes: Sequence[int], time_us: Sequence[float]) -> Line:
    """The line with the least squared relative error, so that small messages weigh as much as large ones.

    Neither α nor 1/β is negative. Raises ValueError for fewer than two sizes.
    """
    if len(set(num_bytes)) < 2:
        raise ValueError(f"A line needs two sizes or more; there {'is' if len(set(num_bytes)) == 1 else 'are'} "
                         f"{len(set(num_bytes))}.")  # fmt: skip
    size, took = np.asarray(num_bytes, np.float64), np.asarray(time_us, np.float64)
    alpha, per_byte = _least_squares(size, took)
    residuals = (took - alpha - per_byte * size) / took
    return Line(alpha, 1 / (1e3 * per_byte) if per_byte > 0 else None, tuple(residuals.tolist()))


def _least_squares(size: np.ndarray, took: np.ndarray) -> tuple[float, float]:
    weighted = np.stack([1 / took, size / took], axis=1)
    alpha, per_byte = np.linalg.lstsq(weighted, np.ones(len(took)), rcond=None)[0].tolist()
    if alpha < 0:  # through the origin
        return 0.0, float((size / took).sum() / ((size / took) ** 2).sum())
    if per_byte < 0:
        return float((1 / took).sum() / ((1 / took) ** 2).sum()), 0.0
    return alpha, per_byte


def fits(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The line of each operation and place, over its sizes."""
    found = []
    for op in OPS:
        for in_place in (False, True):
            mine = [each for each in rows if each["op"] == op and each["in_place"] == in_place]
            if len({each["bytes"] for each in mine}) > 1:
                line = fit([each["bytes"] for each in mine], [each["time_us"] for each in mine])
                found.append({"op": op, "in_place": in_place, **line.to_dict()})
    return found
