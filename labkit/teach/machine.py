"""What this machine could do at best, measured in a second: the roofs under which every bound stands.

Both roofs are taken with all cores, in NumPy, so that the lesson's kernel needs no torch and no ranks are started, and
of reads alone, which is what a decode does; `labkit bench device` measures copies and products of the ranks themselves
(`Roofs.of`). They are honest for CPU ranks only: a GPU's roofs are its data sheet's, or what that command measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from labkit.measure.device import amount
from labkit.teach.html import Table

_READ_BYTES = 256 * 2**20
_SIDE = 1024


@dataclass(frozen=True)
class Roofs:
    read_gb_s: float
    """Sequential reads from memory, GB = 1e9."""
    gflop_s: float
    """float32 matrix multiplication."""

    @classmethod
    def of(cls, found: Mapping[str, Any], dtype: str = "float32") -> Roofs:
        """From what `labkit bench device --json` prints: each device alone. KeyError for a dtype not measured."""
        return cls(found["copy_gb_s"]["alone"], found["gflop_s"][dtype]["alone"])

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()

    def __repr__(self) -> str:
        return repr(self._table())

    def _table(self) -> Table:
        rows = [
            ["memory reads", f"{self.read_gb_s:.1f} GB/s", "dot product of 256 MiB with itself"],
            ["float32 matrix multiplication", f"{self.gflop_s:.0f} GFLOP/s", f"{_SIDE} × {_SIDE} matrices"],
        ]
        return Table("This machine's roofs, measured just now with all cores", ["", "", "how"], rows)

    def read_ms(self, num_bytes: float) -> float:
        """Least time to read so much."""
        return num_bytes / self.read_gb_s / 1e6

    def compute_ms(self, flops: float) -> float:
        """Least time for so many operations."""
        return flops / self.gflop_s / 1e6


def measure_roofs(repeats: int = 5) -> Roofs:
    """The best of some repeats: a roof is what was possible once."""
    row = np.ones(_READ_BYTES // 4, np.float32)
    square = np.ones((_SIDE, _SIDE), np.float32)
    read_s = min(_time(lambda: row @ row) for _ in range(repeats))
    multiply_s = min(_time(lambda: square @ square) for _ in range(repeats))
    return Roofs(_READ_BYTES / read_s / 1e9, amount("matmul", _SIDE) / multiply_s / 1e9)


def _time(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
