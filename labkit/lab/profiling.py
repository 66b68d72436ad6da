"""`lab.profile`: a run of its own with torch.profiler on some ranks, and what their devices did, step by step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.lab.ceilings import Ceilings, ceilings_of
from labkit.lab.plan import ProfilePlan, plan_of
from labkit.lab.run import Run, open_store
from labkit.measure.export import whole_trace
from labkit.measure.kernels import RankKernels, parse, read_trace

if TYPE_CHECKING:
    import pandas as pd

    from labkit.lab.lab import Lab
    from labkit.lab.running import OnUpdate
    from labkit.layout import AnyLayout
    from labkit.load.workload import Workload


@dataclass
class Profile:
    """A profiled run. Its kernels are figures; its latencies are not, and are refused where latencies are compared."""

    run: Run
    ranks: dict[int, RankKernels] = field(default_factory=dict)
    """Of each profiled rank that ran a step."""

    @classmethod
    def load(cls, run_id: str) -> Profile:
        """A stored one. Raises KeyError when there is no such run, ValueError when nothing in it was profiled."""
        with open_store() as store:
            run, paths = Run.load(run_id, store), store.profiles(run_id)
        if not paths:
            raise ValueError(
                f"The run {run_id} left no profile: no step of its ranks was profiled. `labkit profile` makes one; "
                f"give it more seconds, or fewer --skip."
            )
        return cls(run, {rank: parse(read_trace(path), rank) for rank, path in paths.items()})

    def table(self) -> pd.DataFrame:
        """One row a kernel (on a CPU: operator) and rank, the longest first."""
        import pandas as pd

        rows = [{"rank": rank, **vars(work)} for rank, found in self.ranks.items() for work in found.works]
        return pd.DataFrame(rows, columns=["rank", "name", "kind", "num", "ms", "flops", "bytes"])

    @property
    def ceilings(self) -> Ceilings | None:
        """What a rank's device can do at best, where `labkit bench device` has measured it on this host."""
        return ceilings_of(self.run.environment) if self.run.environment else None

    def save_trace(self, path: str | Path) -> Path:
        """One trace for Perfetto: our timeline and the profiler's, as `labkit export --format trace` gives it."""
        with open_store() as store:
            told = whole_trace(store, self.run.run_id)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(told))
        return path

    def to_dict(self) -> dict[str, Any]:
        """What `labkit profile --json` prints."""
        return {
            "run_id": self.run.run_id,
            "layout": self.run.summary.get("layout"),
            "model": self.run.summary.get("model"),
            "profiled": self.run.summary.get("profiled"),
            "ceilings": vars(self.ceilings) if self.ceilings else None,
            "ranks": [found.to_dict() for found in self.ranks.values()],
        }


def profile(
    lab: Lab,
    layout: AnyLayout | str | None = None,
    workload: str | Workload = "chat",
    rate: float | None = None,
    seconds: float | None = 30.0,
    *,
    steps: int = 20,
    ranks: Sequence[int] = (0,),
    skip: int = 5,
    on_update: OnUpdate | None = None,
    **more: Any,
) -> Profile:
    """See `Lab.profile`."""
    chosen = ProfilePlan(tuple(ranks), steps, skip)
    more.setdefault("warmup_s", 0.0)
    run = lab.run_plan(plan_of(layout, workload, rate, seconds, profile=chosen, **more), on_update)
    if run.status == "failed":
        raise ValueError(f"The profiled run failed: {run.summary.get('error')}")
    return Profile.load(run.run_id)
