"""This machine's roofs as a table in a lesson."""

from __future__ import annotations

from labkit.measure.roofs import SIDE, MachineRoofs
from labkit.teach.html import Table


class Roofs(MachineRoofs):
    """`MachineRoofs` that a notebook shows."""

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()

    def __repr__(self) -> str:
        return repr(self._table())

    def _table(self) -> Table:
        rows = [
            ["memory reads", f"{self.read_gb_s:.1f} GB/s", "dot product of 256 MiB with itself"],
            ["float32 matrix multiplication", f"{self.gflop_s:.0f} GFLOP/s", f"{SIDE} × {SIDE} matrices"],
        ]
        return Table("This machine's roofs, measured just now with all cores", ["", "", "how"], rows)
