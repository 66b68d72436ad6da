"""What a lesson shows where it says why: whom the ranks waited for, and its messages on the curve of their fabric."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from labkit.lab import Run
from labkit.measure.lateness import who_is_late
from labkit.measure.stragglers import KEYS, stragglers
from labkit.server.client import ServerError
from labkit.teach.html import Table

MOST_RANKS = 4
"""Of an axis: those that are last most often."""


def last_table(runs: Mapping[str, Run], phase: str = "decode", axis: str = "") -> Table:
    """Who was last to the collectives of that phase, how often and by how much, for each run and axis; `even` is what
    ranks that take turns would have. Below it, whether that is somebody's fault.
    """
    rows, remarks = [], []
    for label, run in runs.items():
        calls = run.collectives
        calls = calls[(calls["phase"] == phase) & ((calls["axis"] == axis) if axis else True)] if len(calls) else calls
        if not len(calls):
            continue
        rows += [[label, *row] for row in _last(calls)]
        sentence, _ = who_is_late(calls, (phase,), run.summary["step_share"]["by_rank"])
        remarks.append(f"{label}: {sentence}")
    if not rows:
        remarks = [f"No rank waited for another in {phase} steps: nothing of them crosses between ranks."]
    columns = ["run", "axis", "rank", "was last to", "even would be", "behind the one before it (p50)"]
    return Table(f"Who was last to each collective, {phase} steps", columns, rows, remarks)


def _last(calls: Any) -> list[list[str]]:
    found = stragglers(calls)
    found = found.groupby("axis", sort=False, observed=True).head(MOST_RANKS)
    sizes = calls.groupby([*KEYS, "axis"], observed=True).size().groupby("axis", observed=True).max()
    return [
        [str(row.axis).upper(), str(row.rank), f"{row.share:.0%} of {row.of:,}", f"{1 / int(sizes[row.axis]):.0%}",
         f"{row.behind_us:,.0f} µs"]
        for row in found.itertuples()
    ]  # fmt: skip


def bench_collectives(model: str, ranks: int = 2, op: str = "all_reduce", quick: bool = False, **more: str) -> Any:
    """`labkit bench collectives` on ranks of its own, sizes from 1 KiB to 4 MiB: its JSON. Raises ServerError with its
    sentence. more: further options, such as fabric="gloo".
    """
    options = {"ranks": str(ranks), "op": op, "model": model, "min-bytes": "1KiB", "max-bytes": "4MiB"}
    options |= {"factor": "16", "rounds": "5", "warmup": "1"} if quick else {"factor": "4", "rounds": "20"}
    words = [word for name, value in {**options, **more}.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "labkit.cli", "bench", "collectives", "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise ServerError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "The bench failed.")
    return json.loads(done.stdout.splitlines()[-1])
