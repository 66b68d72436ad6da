"""A step of the simulator: the engine's plan, with those that decode in it counted where they are not listed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from labkit.engine.plan import StepPlan
from labkit.plan.sim.request import Job


@dataclass(slots=True, eq=False)
class SimPlan(StepPlan):
    """A step; those that decode in it are counted where they are not listed."""

    num_decodes: int = 0
    decode_context: int = 0
    """KV tokens of all decodes together, the new ones counted."""
    is_pure: bool = False
    """Nothing but decodes that are counted: the same step may follow at once."""
    begun: list[Job] = field(default_factory=list)
    """Have just been let in, some of them anew after a preemption."""

    def __bool__(self) -> bool:
        return bool(self.prefills or self.num_decodes)


def counted(plan: StepPlan) -> SimPlan:
    """The engine's plan with what `work_of` asks for. Read before the next one is made."""
    context = sum(request.num_computed for request in plan.decodes)
    begun = [
        cast(Job, request)
        for request, chunk, end in zip(plan.prefills, plan.chunks, plan.ends, strict=True)
        if end - chunk == request.num_cached
    ]
    return SimPlan(
        plan.prefills, plan.chunks, plan.ends, plan.sampled, plan.decodes, len(plan.decodes), context, False, begun
    )
