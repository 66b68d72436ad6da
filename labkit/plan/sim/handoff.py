"""KV on its way between simulated pools: one move at a time out of a replica and into one, in order of admission."""

from __future__ import annotations

from collections.abc import Mapping

from labkit.plan.sim.replica import SimReplica
from labkit.plan.sim.request import Job
from labkit.plan.work import StepCost


class Handoffs:
    def __init__(self, cost: StepCost | Mapping[str, StepCost]) -> None:
        self._cost = cost.get("prefill") if isinstance(cost, Mapping) else cost
        self._sources: dict[int, SimReplica] = {}
        self._free_at: dict[int, float] = {}
        """By replica: when its link has nothing more to carry."""

    def open(self, job: Job, source: SimReplica) -> None:
        """It has been prefilled there, and waits for blocks elsewhere."""
        self._sources[job.index] = source

    def start(self, job: Job, target: SimReplica, now: float) -> float:
        """It has its blocks: when its KV will be there."""
        source = self._sources[job.index]
        assert self._cost is not None
        begin = max(now, self._free_at.get(source.index, 0.0), self._free_at.get(target.index, 0.0))
        end = begin + self._cost.handoff_seconds(job.arriving - job.num_computed)
        self._free_at[source.index] = self._free_at[target.index] = end
        return end

    def close(self, job: Job) -> SimReplica:
        """It has landed; returns where its blocks may go now."""
        return self._sources.pop(job.index)
