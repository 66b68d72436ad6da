"""Reading what nccl-tests prints (all_reduce_perf, all_gather_perf, …), to stand beside our own bench.

A row is size, count, type, reduction, root, then time (µs), algbw, busbw (GB/s, base 10) and #wrong, out of place
and then in place, as nccl-tests' PERFORMANCE.md and README say. Lines that begin with # are its heads and totals.
"""

from __future__ import annotations

from typing import Any

_PER_PLACE = 4


def parse(text: str) -> list[dict[str, Any]]:
    """{bytes, in_place, time_us, algbw_gb_s, busbw_gb_s, wrong} for each measured size; wrong None where unchecked."""
    found: list[dict[str, Any]] = []
    for line in text.splitlines():
        words = line.split()
        if len(words) < 2 + 2 * _PER_PLACE or not words[0].isdigit():
            continue
        for in_place, last in ((False, len(words) - _PER_PLACE), (True, len(words))):
            time_us, algbw, busbw, wrong = words[last - _PER_PLACE : last]
            found.append({
                "bytes": int(words[0]), "in_place": in_place, "time_us": float(time_us), "algbw_gb_s": float(algbw),
                "busbw_gb_s": float(busbw), "wrong": int(wrong) if wrong.isdigit() else None,
            })  # fmt: skip
    return found
