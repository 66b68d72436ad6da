"""A stored run as the planner reads it: its summary, rows and steps, and the traffic that it was.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.layout import Layout, pools_of, read_layout
from labkit.measure.metrics import Window, counted, num_tokens
from labkit.measure.records import RequestRecord, StepRecord
from labkit.measure.store import Store
from labkit.paths import home_dir
from labkit.plan.demand import Demand, demand_of_rows
from labkit.plan.work import EngineSettings

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class PlannedFrom:
    """What `labkit.measure.explain` asks of a run, read from the store."""

    run_id: str
    summary: dict[str, Any]
    records: list[RequestRecord] = field(repr=False)
    step_records: list[StepRecord] = field(repr=False)
    store: Store = field(repr=False)

    @classmethod
    def load(cls, run_id: str) -> PlannedFrom:
        """`last` is the newest. Raises KeyError with a sentence when there is none, ValueError for one without a
        summary."""
        store = Store(home_dir() / "store.sqlite")
        newest = store.runs(1) if run_id == "last" else []
        run_id = newest[0]["run_id"] if newest else run_id
        row = store.run(run_id)
        summary = row["summary"] or {}
        if "ttft_ms" not in summary:
            raise ValueError(f"Run {run_id} is {row['status']}: it has no summary that could be read.")
        return cls(run_id, summary, store.request_records(run_id), store.step_records(run_id), store)

    @property
    def window(self) -> Window:
        window = self.summary["window"]
        return Window(window["start_ns"], window["end_ns"])

    @property
    def collectives(self) -> pd.DataFrame:
        return self.store.collectives(self.run_id)

    def layout(self) -> Layout | None:
        """Of the one pool; None where it was several, or was not noted."""
        slug = self.summary.get("layout")
        pools = pools_of(read_layout(slug)) if slug else ()
        return pools[0].layout if len(pools) == 1 else None

    def demand(self) -> Demand:
        """Lengths as they were, at the load that was offered. Raises ValueError when nothing was answered."""
        rows = [(record.prompt_tokens or record.asked_prompt_tokens, num_tokens(record))
                for record in counted(self.records, self.window) if record.status == "completed"]  # fmt: skip
        rows = [(prompt, answer) for prompt, answer in rows if prompt and answer]
        if not rows:
            raise ValueError(f"Run {self.run_id} has no answered request whose length is known.")
        cached = [record.cached_tokens for record in counted(self.records, self.window) if record.status == "completed"]
        concurrency = self.summary.get("concurrency")
        rate = None if concurrency else self._rate()
        return demand_of_rows(self.summary.get("workload") or self.run_id, rows, round(float(np.mean(cached or [0]))),
                              rate, concurrency)  # fmt: skip

    def _rate(self) -> float:
        given = self.summary.get("offered_rate") or self.summary.get("rate")
        if given:
            return float(given)
        window = self.window
        return len(counted(self.records, window)) / max(window.seconds, 1e-9)

    def settings(self) -> EngineSettings:
        """The engine's, where our own noted them; a production engine's defaults otherwise."""
        told = self.summary.get("settings") or {}
        known = {name: told[name] for name in ("max_num_batched_tokens", "max_num_seqs", "block_size") if name in told}
        if not known:
            return EngineSettings()
        return EngineSettings(policy=told.get("admission", "labkit"), gpu_memory_utilization=0.9,
                              enable_prefix_caching=bool(told.get("prefix_cache", True)), **known)  # fmt: skip

    def expert_load(self) -> list[float]:
        """Tokens by expert; empty where no step tells of experts."""
        from labkit.measure.expert_totals import expert_totals

        try:
            return [float(tokens) for tokens in expert_totals(self.step_records).tokens]
        except ValueError:
            return []
