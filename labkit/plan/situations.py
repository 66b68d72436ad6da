"""Five situations and where each leads: a queue at peak, long inputs too slow, one answer too slow, KV too small, and
two fast pairs joined by a slow path.

Each names a model, GPUs, the traffic, the wish that is missed, and what serves now. The layout that each ends in is not
written here: it is what `advise` finds.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.layout import Layout
from labkit.model.spec import load_spec
from labkit.plan.advise import Advice, advise
from labkit.plan.demand import Demand, read_demand
from labkit.plan.hardware import load_hardware
from labkit.plan.objective import PlanObjective


@dataclass(frozen=True)
class Situation:
    code: str
    title: str
    model: str
    gpus: str
    workload: str
    """Tokens in / tokens out, or a workload's name."""
    objective: PlanObjective
    rate: float | None = None
    concurrency: int | None = None
    now: str = "tp2"
    """The layout that serves; empty: none yet."""

    @property
    def demand(self) -> Demand:
        return read_demand(self.workload, rate=self.rate, concurrency=self.concurrency)

    def advise(self, verify: bool = True) -> Advice:
        return advise(
            load_spec(self.model), load_hardware(self.gpus), self.demand, self.objective,
            current=Layout.parse(self.now) if self.now else None, verify=verify, asked=self.workload,
        )  # fmt: skip
