"""What a device can do at best: how fast it copies, and how fast it multiplies; the ceilings of every step.

Base-10 (1 GB = 10⁹ bytes). A copy reads the buffer and writes it, so it moves twice its bytes, as STREAM counts them
(a processor that fetches what it is about to overwrite moves half as much again, which is not counted). A product of
two square matrices takes 2·side³ operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

WORK = ("copy", "matmul")


def amount(what: str, size: int) -> float:
    """Bytes moved by a copy of so many bytes, or operations of a product of that side. Raises ValueError."""
    if what not in WORK:
        raise ValueError(f"{what!r} is no work that is measured here; there are {', '.join(WORK)}.")
    return 2.0 * size if what == "copy" else 2.0 * size**3


def row(
    what: str, dtype: str, size: int, times_ns: Sequence[int], *, wrong: int, together: bool, **more: Any
) -> dict[str, Any]:
    """One rank's line; `rate` (GB/s or GFLOP/s) is of the median round, `best_rate` of the shortest."""
    took = np.asarray(times_ns, np.float64)
    done = amount(what, size)
    return {
        "what": what,
        "dtype": dtype,
        "size": size,
        "unit": "GB/s" if what == "copy" else "GFLOP/s",
        "together": together,
        "time_us": float(np.median(took)) / 1e3,
        "rate": done / float(np.median(took)),  # so many a nanosecond are 10⁹ a second
        "best_rate": done / float(took.min()),
        "n": len(took),
        "wrong": wrong,
        **more,
    }


def ceilings(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """{copy_gb_s, gflop_s: {dtype: …}}, each {alone: mean of the ranks' rates, together: their sum, all at once}.

    together ÷ (alone × ranks) says what ranks take from each other: 1 for devices of their own, less where they share.
    """
    found: dict[str, Any] = {"copy_gb_s": _pair(rows, "copy", None), "gflop_s": {}}
    for dtype in dict.fromkeys(each["dtype"] for each in rows if each["what"] == "matmul"):
        found["gflop_s"][dtype] = _pair(rows, "matmul", dtype)
    return found


def _pair(rows: Sequence[Mapping[str, Any]], what: str, dtype: str | None) -> dict[str, float | None]:
    mine = [each for each in rows if each["what"] == what and dtype in (None, each["dtype"])]
    alone = [each["rate"] for each in mine if not each["together"]]
    together = [each["rate"] for each in mine if each["together"]]
    return {
        "alone": float(np.mean(alone)) if alone else None,
        "together": float(np.sum(together)) if together else None,
    }
