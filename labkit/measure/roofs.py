"""What this machine could do at best, measured in a second: the roofs under which every bound stands.

Both roofs are taken with all cores, in NumPy, so that no torch and no ranks are needed, and of reads alone, which is
what a decode does; `labkit bench device` measures copies and products of the ranks themselves (`MachineRoofs.of`).
They are honest for CPU ranks only: a GPU's roofs are its data sheet's, or what that command measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from labkit.measure.device import amount

READ_BYTES = 256 * 2**20
SIDE = 1024


@dataclass(frozen=True)
class MachineRoofs:
    """GB = 1e9, all cores together."""

    read_gb_s: float
    """Sequential reads from memory."""
    gflop_s: float
    """float32 matrix multiplication."""

    @classmethod
    def of(cls, found: Mapping[str, Any], dtype: str = "float32") -> Self:
        """From what `labkit bench device --json` prints: each device alone. KeyError for a dtype not measured."""
        return cls(found["copy_gb_s"]["alone"], found["gflop_s"][dtype]["alone"])

    @classmethod
    def measured(cls, repeats: int = 5) -> Self:
        """The best of some repeats: a roof is what was possible once."""
        row = np.ones(READ_BYTES // 4, np.float32)
        square = np.ones((SIDE, SIDE), np.float32)
        read_s = min(_time(lambda: row @ row) for _ in range(repeats))
        multiply_s = min(_time(lambda: square @ square) for _ in range(repeats))
        return cls(READ_BYTES / read_s / 1e9, amount("matmul", SIDE) / multiply_s / 1e9)

    def read_ms(self, num_bytes: float) -> float:
        """Least time to read so much."""
        return num_bytes / self.read_gb_s / 1e6

    def compute_ms(self, flops: float) -> float:
        """Least time for so many operations."""
        return flops / self.gflop_s / 1e6


def _time(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
