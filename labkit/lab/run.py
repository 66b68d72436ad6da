"""A run that took place: its summary, its rows, and what it says about itself.

The rows are kept as records and become DataFrames when asked for; the store keeps the same, so that a run of
yesterday (`Run.load`) answers like one of a minute ago.
"""

from __future__ import annotations

import functools
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.lab.client_process import status_of
from labkit.measure.metrics import Window
from labkit.measure.records import RequestRecord, StepRecord
from labkit.measure.store import Store
from labkit.measure.tables import REQUESTS, STEPS, Table
from labkit.paths import home_dir

if TYPE_CHECKING:
    import pandas as pd

    from labkit.measure.achieved import Roofs
    from labkit.measure.explain import Explanation
    from labkit.measure.memory import MemoryAccount


def open_store() -> Store:
    return Store(home_dir() / "store.sqlite")


@dataclass
class Run:
    """`summary` is the object that `labkit run --json` prints; `requests`, `steps`, … are DataFrames."""

    run_id: str
    summary: dict[str, Any]
    records: list[RequestRecord] = field(repr=False)
    """Every request, warm-up included, in the order of the schedule."""
    step_records: list[StepRecord] = field(repr=False, default_factory=list)
    status: str = "finished"
    """finished, stopped (by its user, before its schedule was over), failed (`summary['error']` says why), running
    (elsewhere, still), or killed (its client was, in the middle of it).
    """
    provenance: str = "measured"
    """measured (by this process, now) or recorded (read back from the store): figures draw them apart."""

    @classmethod
    def load(cls, run_id: str, store: Store | None = None) -> Run:
        """A stored run. Raises KeyError with a sentence when there is none."""
        store = store or open_store()
        row = store.run(run_id)
        return cls(
            run_id,
            row["summary"] or {},
            store.request_records(run_id),
            store.step_records(run_id),
            status_of(row),
            "recorded",
        )

    @property
    def quality(self) -> list[dict[str, str]]:
        return list(self.summary.get("quality", []))

    @property
    def environment(self) -> dict[str, Any]:
        return dict(self.summary.get("environment") or {})

    @property
    def window(self) -> Window:
        window = self.summary["window"]
        return Window(window["start_ns"], window["end_ns"])

    @functools.cached_property
    def requests(self) -> pd.DataFrame:
        """One row a request: the client's columns, `server_…` beside them, and ttft_ms, tpot_ms, e2el_ms."""
        from labkit.measure import metrics

        frame = _frame(REQUESTS, self.records, run_id=self.run_id)
        for name in ("ttft_ms", "tpot_ms", "e2el_ms"):
            frame[name] = [getattr(metrics, name)(record) for record in self.records]
        return frame

    @functools.cached_property
    def steps(self) -> pd.DataFrame:
        """One row a step; per-rank columns hold lists in the order of `ranks`. Empty for a foreign server."""
        return _frame(STEPS, self.step_records)

    @functools.cached_property
    def memory(self) -> pd.DataFrame:
        """One row a rank: weights, kv, other, free, in bytes."""
        import pandas as pd

        return pd.DataFrame(self.summary.get("memory_bytes") or [])

    @property
    def memory_parts(self) -> MemoryAccount:
        """Each rank's memory part by part, counted beside measured."""
        from labkit.measure.memory import memory_account

        return memory_account(self.summary)

    @functools.cached_property
    def collectives(self) -> pd.DataFrame:
        """One row per collective and rank, from the parquet that the server wrote when the run ended."""
        with open_store() as store:
            return store.collectives(self.run_id)

    @functools.cached_property
    def telemetry(self) -> pd.DataFrame:
        """One row a sample: source, kind (gpu, rank, host), index, and the values by name, each a column."""
        import pandas as pd

        with open_store() as store:
            rows = store.telemetry(self.run_id)
        return pd.concat([rows.drop(columns="values"), pd.DataFrame(list(rows["values"]))], axis=1)

    def plot(self) -> Any:
        """The run as a plotly figure."""
        import importlib

        return importlib.import_module("labkit.show.figures").run_figure(self)

    def explain(self, other: Run | None = None, roofs: Roofs | None = None) -> Explanation:
        """Where TTFT and TPOT went and what holds them up; with `other`, what grew from this run to that one.

        Prints it where nothing else would show what is returned. roofs: by default this machine's, measured when
        first needed, for a run on this machine's CPU, and what `labkit bench device` kept of its GPUs; else
        products and memory are not told apart.
        """
        found = self.explanation(other, roofs)
        if not (hasattr(sys, "ps1") or "ipykernel" in sys.modules):
            print(found)
        return found

    def explanation(self, other: Run | None = None, roofs: Roofs | None = None) -> Explanation:
        """The same, never printed. Raises ValueError for a run that has no summary."""
        from labkit.measure.explain import explain

        for run in (self, other):
            if run is not None and "ttft_ms" not in run.summary:
                raise ValueError(f"Run {run.run_id} is {run.status}: it has no summary that could be explained.")
        return explain(self, other, roofs or _own_roofs(self))

    def save(self, target: str | Path, kind: str = "vllm") -> list[Path]:
        """Write the run out: vllm or trace (one JSON), parquet or csv (a folder). Returns the files."""
        from labkit.measure.export import export_run

        with open_store() as store:
            return export_run(store, self.run_id, kind, Path(target))

    def __repr__(self) -> str:
        completed = self.summary.get("requests", {}).get("completed", 0)
        return f"Run({self.run_id}, {self.status}, {completed} completed)"


def _own_roofs(run: Run) -> Roofs | None:
    environment = run.environment
    if environment.get("host") != socket.gethostname():
        return None
    if environment.get("backend") == "cpu":
        return _measured_roofs()
    from labkit.lab.roofs import gpu_roofs

    return gpu_roofs(environment)


@functools.cache
def _measured_roofs() -> Roofs:
    from labkit.measure.roofs import MachineRoofs

    return MachineRoofs.measured()


def refuse_profiled(runs: Sequence[Run]) -> None:
    """ValueError for a run in which a profiler ran, where figures of latency are asked for."""
    for run in runs:
        if "profiled" in run.summary:
            raise ValueError(
                f"The run {run.run_id} was profiled, and its latencies are the profiler's too: compare and draw runs "
                f"without a profiler; its kernels are in `labkit.lab.Profile.load`."
            )


def _frame(table: Table, records: Sequence[Any], **more: Any) -> pd.DataFrame:
    import pandas as pd

    names = [column.name for column in table.columns]
    rows = [[table.value(name, record, more) for name in names] for record in records]
    return pd.DataFrame(rows, columns=names)
