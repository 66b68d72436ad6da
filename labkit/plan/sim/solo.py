"""A replica that steps alone on a virtual clock: a `Unit` that waits for nobody, and so has less to go through."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.plan.sim.cost import DecodeTable, work_of
from labkit.plan.sim.plan import SimPlan
from labkit.plan.sim.replica import SimReplica
from labkit.plan.sim.request import Job
from labkit.plan.sim.unit import Ended, Unit
from labkit.plan.work import StepCost


class SoloUnit(Unit):
    """Does what a `Unit` of one replica does."""

    __slots__ = ("_replica", "_scheduler", "_plan")

    def __init__(
        self, replicas: Sequence[SimReplica], cost: StepCost, table: DecodeTable, *, window: int = 0,
        ahead: bool = False, jump: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(replicas, cost, table, window=window, ahead=ahead, jump=jump)
        (self._replica,) = self.replicas
        self._scheduler = self._replica.scheduler
        self._plan: SimPlan | None = None

    def begin(self, now: float) -> Sequence[Job]:
        scheduler = self._scheduler
        self._plan = plan = scheduler.schedule()
        released = self.ahead and scheduler.release_finished()
        self.version += 1
        if plan is None:
            self.wakes_at = self.free_at if self.free_at > now or released else None
            return ()
        self.start = now if now > self.free_at else self.free_at
        more = self._set_pace(plan, released)
        if more:
            self._set_alarm()
        else:
            self.free_at = self.start + self.pace.first
            self.wakes_at = self.start if self.ahead else self.free_at
        begun: Sequence[Job] = plan.begun
        return begun

    def _set_pace(self, plan: SimPlan, released: bool) -> int:
        """Of the step planned, and of those like it that follow: how many there are."""
        pace, more = self.pace, 0
        if plan.is_pure:
            num, context, of = plan.num_decodes, plan.decode_context, self._table.of
            pace.first = of(num, context)
            if self.jump and not (released and self._scheduler.waiting):
                more = self._scheduler.num_quiet_steps()
                if more:
                    pace.num, pace.slope = 1 + more, (of(num, context + more * num) - pace.first) / more
        else:
            pace.first = self.cost.seconds(work_of(plan, self.window))
        return more

    def end(self) -> Ended:
        plan, pace, self.wakes_at = self._plan, self.pace, None
        if plan is None:
            return self.free_at, ()
        self._plan = None
        num_steps, pace.num, pace.slope = pace.num, 1, 0.0
        self.num_steps += num_steps
        scheduler, replica = self._scheduler, self._replica
        if num_steps > 1:
            scheduler.skip(num_steps - 1)
        pool = scheduler.pool
        used = pool.num_blocks - pool.num_free
        if used > replica.peak_blocks:
            replica.peak_blocks = used
        return self.free_at, ((replica, plan, scheduler.complete(plan)),)
