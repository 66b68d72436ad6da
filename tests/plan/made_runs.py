"""Runs made by hand whose limit was put in: so many ms of queue, of compute, steps so full, KV so used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from labkit.measure.breakdown import step_share, summarize_tpot, summarize_ttft
from labkit.measure.metrics import Window, summarize
from labkit.measure.steady import steady_state
from tests.measure.make import MS, request, server_times, step

TTFT = {"network": 2.0, "queue": 5.0, "compute": 80.0, "wait": 5.0, "transfer": 5.0, "delivery": 3.0}
DECODE = {"queue": 1.0, "compute": 8.0, "wait": 0.5, "transfer": 0.5}


@dataclass
class MadeRun:
    records: list
    step_records: list = field(default_factory=list)
    collectives: Any = field(default_factory=lambda: pd.DataFrame(columns=["phase"]))
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def window(self) -> Window:
        return Window.of(self.records)

    @property
    def summary(self) -> dict[str, Any]:
        where = {"backend": "cpu", "dtype": "float32", "num_cores": 2, "num_ranks": 2, "threads_per_rank": 1}
        settings = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "block_size": 16}
        return {
            "run_id": "made", "layout": "tp2", "model": "lab-5m", "workload": "chat", "rate": 10.0,
            "environment": where, "settings": settings, "handoff": None, "engine": None, "concurrency": None,
            "memory_bytes": [{"rank": rank, "weights": 100, "kv": 10**9, "other": 0, "free": 0} for rank in (0, 1)],
            **summarize(self.records), **summarize_ttft(self.records), **summarize_tpot(self.records),
            "steady": steady_state(self.records, self.window),
            "step_share": step_share(self.step_records, self.window, range(2)), **self.more,
        }  # fmt: skip


def made_run(
    n: int = 240, ttft: dict[str, float] = TTFT, decode: dict[str, float] = DECODE, *, prompts: float = 0.1,
    seqs: int = 4, preemptions: int = 0, num_tokens: int = 10, **more: Any,
) -> MadeRun:  # fmt: skip
    """prompts: of the time of steps with decodes, in steps that carry prompts; seqs: decodes of each step."""
    records = []
    for index in range(n):
        at, first = index * 100.0, index * 100.0 + sum(ttft.values())
        gap = sum(decode.values())
        record = request(at, tuple(first + k * gap for k in range(num_tokens)), index=index)
        told = {f"decode_{name}_ns": round(value * (num_tokens - 1) * MS) for name, value in decode.items()}
        record.server = server_times(record, ttft, **told, num_preemptions=preemptions)
        record.server.last_end_ns = record.last_ns - round(ttft["delivery"] * MS)
        records.append(record)
    share = ([24.0, 24.0], [3.0, 3.0], [3.0, 3.0])
    steps = []
    for i in range(n):
        mixed = i < prompts * n
        steps.append(step(i * 100, i * 100 + 30, *share, step_id=i, prefill=int(mixed), decode=seqs))
    return MadeRun(records, steps, more=more)
