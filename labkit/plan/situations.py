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


SITUATIONS = (
    Situation("queue", "The queue grows at peak", "llama-3.1-70b", "4xh200", "1024/256",
              PlanObjective(ttft_ms=2000, tpot_ms=100), rate=8),
    Situation("long-inputs", "Long inputs take too long to their first token", "llama-3.1-70b", "4xh200", "32768/64",
              PlanObjective(ttft_ms=4800, tpot_ms=150), rate=0.03),
    Situation("one-answer", "One answer is written too slowly", "llama-3.1-70b", "4xh200", "1024/256",
              PlanObjective(answer_tokens_per_s=60), concurrency=1),
    Situation("kv", "KV holds too few long conversations", "deepseek-v3", "8xh200", "32768/512",
              PlanObjective(ttft_ms=90_000, tpot_ms=300), concurrency=64, now="tp8"),
    Situation("pairs", "Two fast pairs, a slow path between them", "llama-3.1-70b", "4xa100-pairs", "1024/256",
              PlanObjective(ttft_ms=4000, tpot_ms=150), rate=1.5, now=""),
)  # fmt: skip
"""Where each leads is tested in tests/plan/test_situations.py."""
