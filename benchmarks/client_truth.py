"""How far the load client is off, against a server that answers on a known schedule and logs what it did.

The server (one C file, not part of this project) promises TTFT 50 ms and TPOT 10 ms and logs its instants, to
which each request's figures are compared. First two rates are measured, then one short run for each habit of
servers that has misled load generators. Prints tables, and one JSON line last.

    python benchmarks/client_truth.py [--source server.c] [--rates 20 200] [--seconds 30]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from known_schedule import (
    NUM_TOKENS,
    TPOT_MS,
    TTFT_MS,
    Truth,
    accuracy,
    build,
    completed,
    default_source,
    itl_ms,
    measure,
    pairs,
    tpot_ms,
    ttft_ms,
)

from labkit.load.driver import DriverProcess
from labkit.load.report import LoadReport

# ---- habits of servers, each with what must come out


@dataclass(frozen=True)
class Habit:
    """A server's habit: its settings, what is checked, and the check over (report, truths)."""

    name: str
    options: tuple[str, ...]
    right: str
    check: Callable[[LoadReport, list[Truth]], bool]


def _near(value: float, wanted: float, within: float) -> bool:
    return abs(value - wanted) <= within


def _plain_figures(report: LoadReport, truths: list[Truth]) -> bool:
    rows = completed(report)
    return (
        len(rows) == len(truths)
        and all(record.n == NUM_TOKENS for record in rows)
        and _near(float(np.median([ttft_ms(record) for record in rows])), TTFT_MS, 1.0)
        and _near(float(np.median([tpot_ms(record) for record in rows])), TPOT_MS, 0.2)
        and _near(float(np.median(itl_ms(rows))), TPOT_MS, 0.5)
        and all(sum(record.chunk_tokens) == record.n for record in rows)
    )


def _exact_chunks(report: LoadReport, truths: list[Truth]) -> bool:
    wanted = [1, *[4] * 7, 3]
    return _plain_figures(report, truths) and all(row.chunk_tokens == wanted for row in completed(report))


def _late_usage(report: LoadReport, truths: list[Truth]) -> bool:
    waits_ms = [(record.end_ns - record.last_ns) / 1e6 for record in completed(report)]
    return _plain_figures(report, truths) and _near(float(np.median(waits_ms)), 200.0, 5.0)


def _failures(report: LoadReport, truths: list[Truth]) -> bool:
    failed = [record for record in report.records if record.status == "failed"]
    refused_there = sum(truth.cut == 5 for truth in truths)
    return refused_there > 0 and len(failed) == refused_there and all("boom" in record.error for record in failed)


def _cuts(report: LoadReport, truths: list[Truth]) -> bool:
    failed = [record for record in report.records if record.status == "failed"]
    cut_there = sum(truth.cut == 1 for truth in truths)
    return cut_there > 0 and len(failed) == cut_there and all(record.first_ns and record.n for record in failed)


def _stall(report: LoadReport, truths: list[Truth]) -> bool:
    """Whoever was due while the server stood still is charged from the instant that it was due."""
    off = [ttft_ms(row) - (truth.first_ns - truth.received_ns) / 1e6 for row, truth in pairs(report, truths)]
    return max(ttft_ms(row) for row in completed(report)) > 900 and _near(float(np.median(off)), 0.0, 1.0)


def _queue(report: LoadReport, truths: list[Truth]) -> bool:
    """One at a time at 0.36 s each: TTFT grows with the queue, and sending goes on regardless."""
    rows = completed(report)
    return report.lateness.p50_ms < 1 and ttft_ms(rows[-1]) > 3 * ttft_ms(rows[0])


HABITS = (
    Habit("role chunk first", ("role=1",), "TTFT is the first token's, not the role's", _plain_figures),
    Habit("four tokens a chunk", ("tpc=4",), "n from usage; TPOT and ITL 10 ms", _plain_figures),
    Habit("four, with usage", ("tpc=4", "ucont=1"), "tokens of every chunk exact", _exact_chunks),
    Habit("usage in each chunk", ("ucont=1",), "as without", _plain_figures),
    Habit("usage 200 ms late", ("udel=200",), "TPOT ends at the last token", _late_usage),
    Habit("every 5th fails", ("fail=5",), "counted as failed, with the reason", _failures),
    Habit("every 5th is cut", ("cut=5",), "counted as failed, tokens kept", _cuts),
    Habit("stands still 1 s", ("stallat=0.5", "stall=1"), "measured from the schedule", _stall),
    Habit("one at a time", ("slots=1",), "an open loop does not wait", _queue),
)


_COLUMNS = (
    ("requests/s", "rate", 10, "g"),
    ("n", "n", 6, "d"),
    ("TTFT p50", "ttft_off_p50_ms", 9, ".3f"),
    ("p99", "ttft_off_p99_ms", 8, ".3f"),
    ("TPOT p50", "tpot_off_p50_ms", 9, ".4f"),
    ("p99", "tpot_off_p99_ms", 8, ".4f"),
    ("ITL p50", "itl_off_p50_ms", 8, ".4f"),
    ("p99", "itl_off_p99_ms", 8, ".3f"),
    ("rate off %", "rate_off_percent", 11, ".4f"),
    ("late p99", "lateness_p99_ms", 9, ".3f"),
    ("server late", "server_late_p99_ms", 12, ".3f"),
)


def print_accuracy(rows: list[dict[str, float | bool]]) -> None:
    print(f"\nTTFT {TTFT_MS:g} ms and TPOT {TPOT_MS:g} ms promised; off: client minus server, ms")
    print(" ".join(f"{title:>{width}}" for title, _, width, _ in _COLUMNS) + "  within the aim")
    for row in rows:
        cells = (f"{row[key]:>{width}{form}}" for _, key, width, form in _COLUMNS)
        print(" ".join(cells) + f"  {row.get('within_aim', '-')}")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--source", type=Path, default=default_source())
    options.add_argument("--rates", type=float, nargs="+", default=[20.0, 200.0])
    options.add_argument("--seconds", type=float, default=30.0)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder, DriverProcess() as driver:
        binary = build(given.source, Path(folder))
        rows = [accuracy(rate, *measure(driver, binary, (), rate, given.seconds)) for rate in given.rates]
        print_accuracy(rows)
        habits = run_habits(driver, binary)
    print(json.dumps({"benchmark": "client_truth", "accuracy": rows, "habits": habits}))
    return 0 if all(habits.values()) and all(row.get("within_aim", True) for row in rows) else 1


def run_habits(driver: DriverProcess, binary: Path) -> dict[str, bool]:
    print(f"\n{'the server ...':22} {'what must come out':44} result")
    results = {}
    for habit in HABITS:
        report, truths = measure(driver, binary, habit.options, 20.0, 2.0)
        results[habit.name] = habit.check(report, truths)
        outcome = "right" if results[habit.name] else "WRONG"
        counts = dict(Counter(row.status for row in report.records))
        print(f"{habit.name:22} {habit.right:44} {outcome}  {counts}")
    return results


if __name__ == "__main__":
    sys.exit(main())
