"""A run's collectives: raw rows appended while it runs, one parquet when it is over.

Appending fixed-size rows costs the writer nothing and survives its being killed: a torn last row is cut off
on reading. Parquet needs its footer, so it is written once, whole, under another name, and then moved into
place.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from labkit.measure.recorder import AXES, MERGED_DTYPE, OPS, PHASES

if TYPE_CHECKING:
    import pandas as pd

_NAMES = {"op": OPS, "axis": AXES, "phase": PHASES}


class CollectiveLog:
    """Append MERGED_DTYPE rows of one run; `close` makes the parquet and removes the raw file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None

    def append(self, rows: NDArray[np.void]) -> None:
        if not len(rows):
            return
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = open(_raw(self._folder), "ab", buffering=0)  # noqa: SIM115 (closed by close)
        self._file.write(rows.tobytes())

    def close(self) -> Path | None:
        """The parquet's path; None when there was nothing. Works on the disk: not on an event loop."""
        if self._file is None:
            return None
        self._file.close()
        self._file = None
        return _to_parquet(self._folder)


def read_collectives(folder: Path) -> pd.DataFrame:
    """The run's rows, with op, axis and phase by name.

    From the raw rows where the writer never came to close.
    """
    import pandas as pd

    if not _raw(folder).exists() and (folder / "collectives.parquet").exists():
        return pd.read_parquet(folder / "collectives.parquet")
    return as_frame(_read_raw(folder))


def as_frame(rows: NDArray[np.void]) -> pd.DataFrame:
    """MERGED_DTYPE rows as `read_collectives` gives them."""
    return _table(rows).to_pandas()


def _raw(folder: Path) -> Path:
    return folder / "collectives.raw"


def _read_raw(folder: Path) -> NDArray[np.void]:
    raw = _raw(folder).read_bytes() if _raw(folder).exists() else b""
    whole = len(raw) // MERGED_DTYPE.itemsize
    return np.frombuffer(raw, MERGED_DTYPE, whole)


def _to_parquet(folder: Path) -> Path:
    import pyarrow.parquet as pq

    final, draft = folder / "collectives.parquet", folder / "collectives.parquet.new"
    pq.write_table(_table(_read_raw(folder)), draft, compression="zstd")
    os.replace(draft, final)
    _raw(folder).unlink()
    return final


def _table(rows: NDArray[np.void]) -> Any:
    import pyarrow as pa

    columns = {}
    for name in MERGED_DTYPE.names or ():
        column = pa.array(np.ascontiguousarray(rows[name]))
        if name in _NAMES:
            names = pa.array(_NAMES[name])
            column = pa.DictionaryArray.from_arrays(column.cast(pa.int8()), names)
        columns[name] = column
    return pa.table(columns)
