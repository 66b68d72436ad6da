"""What the store has, as one chooses from it: a line a run, whichever engine answered and whoever measured it.

Three kinds lie side by side: runs of our own engine, runs of an engine that was started for them (vLLM, SGLang), and
result files that were read in. A file names its client at most: which engine answered is then not known, and not
guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from labkit.layout import read_layout
from labkit.measure.store import Store

SPELLED = {"vllm": "vLLM", "sglang": "SGLang", "vllm bench serve": "vLLM's bench serve"}


class Origin(msgspec.Struct):
    """engine: whose server answered, "" where nobody noted it. recorder: who is to be named for what was not recorded.
    file: where it was read from, if it was.
    """

    engine: str
    recorder: str
    file: str = ""


class StoredRun(msgspec.Struct):
    """One line of the list. What is not known is empty, or None."""

    run_id: str
    name: str
    """Layout and engine in short: TP2, TP2 on vLLM, aiperf."""
    layout: str
    engine: str
    model: str
    workload: str
    rate: float | None
    concurrency: int | None
    started_at: str
    n: int
    """Requests with a TTFT."""


def origin_of(summary: Mapping[str, Any]) -> Origin:
    engine = summary.get("engine")
    if engine is None:
        return Origin("labkit", "labkit") if summary.get("layout") else Origin("", "a foreign server")
    read_from = engine.get("imported")
    if read_from:
        return Origin("", SPELLED.get(read_from["tool"], read_from["tool"]), read_from["file"])
    name = SPELLED.get(engine["name"], engine["name"])
    return Origin(f"{name} {engine.get('version') or ''}".strip(), name)


def short_name(summary: Mapping[str, Any]) -> str:
    origin = origin_of(summary)
    layout = str(read_layout(summary["layout"])) if summary.get("layout") else ""
    if origin.recorder == "labkit":
        return layout
    if origin.file:
        return f"{layout}, {origin.recorder}" if layout else origin.recorder
    return f"{layout} on {origin.recorder}" if layout else origin.recorder


def stored_runs(store: Store, limit: int = 200) -> list[StoredRun]:
    """The newest first; those without figures of latency (failed, unfinished, profiled) are left out."""
    return [_line(row) for row in store.runs(limit) if _has_latencies(row["summary"] or {})]


def _has_latencies(summary: Mapping[str, Any]) -> bool:
    return bool((summary.get("ttft_ms") or {}).get("n")) and "profiled" not in summary


def _line(row: Mapping[str, Any]) -> StoredRun:
    summary = row["summary"]
    return StoredRun(
        run_id=row["run_id"],
        name=short_name(summary),
        layout=summary.get("layout") or "",
        engine=origin_of(summary).engine or origin_of(summary).recorder,
        model=summary.get("model") or "",
        workload=summary.get("workload") or "",
        rate=summary.get("rate"),
        concurrency=summary.get("concurrency"),
        started_at=row["started_at"] or "",
        n=summary["ttft_ms"]["n"],
    )
