"""A pool for long prompts beside one for the others (lesson 04): who was sent where, and what it got."""

from __future__ import annotations

import statistics

from labkit.lab import Run
from labkit.layout import pools_of, read_layout
from labkit.measure.metrics import ttft_ms
from labkit.teach.html import Table


def threshold(crossed: float | str, lengths: tuple[int, ...]) -> int:
    """The crossover where the runs showed one; else the longest of the lengths, so that there is something to send."""
    return round(crossed) if isinstance(crossed, float) else max(lengths)


def pool_table(run: Run) -> Table:
    """Of each pool: which prompts its replicas served, and their median TTFT."""
    pools = pools_of(read_layout(run.summary["layout"]))
    role_of = [pool.role for pool in pools for _ in pool.replicas]
    rows = []
    for pool in pools:
        mine = [
            record
            for record in run.records
            if record.status == "completed" and record.server and role_of[record.server.replica] == pool.role
        ]
        lengths = sorted({record.prompt_tokens for record in mine})
        waits = [wait for wait in map(ttft_ms, mine) if wait is not None]
        median = f"{statistics.median(waits):,.0f} ms" if waits else "–"
        rows.append([pool.role, str(pool.layout), ", ".join(map(str, lengths)) or "none", str(len(mine)), median])
    limit = run.summary["settings"].get("long_prompt_tokens", "?")
    columns = ["pool", "layout", "prompt tokens", "n", "TTFT p50"]
    return Table(f"Prompts of {limit} tokens and more have a pool of their own", columns, rows)
