"""Replicas that step together on a virtual clock: all of a pool that shares experts (attention-DP).

A unit plans a step, and when the plan is nothing but decodes, all the steps like it up to the next instant at which
something can happen. An arrival cuts such a run after the step that is under way. With `ahead` the next step is
planned when this one begins, not when it is back (vLLM's async scheduling): what arrives meanwhile, and what finishes
meanwhile, counts one step later.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.plan.sim.cost import DecodeTable, Pace, work_of
from labkit.plan.sim.plan import SimPlan
from labkit.plan.sim.replica import SimReplica
from labkit.plan.sim.request import Job
from labkit.plan.sim.scheduler import SimScheduler
from labkit.plan.work import StepCost

Ended = tuple[float, Sequence[tuple[SimReplica, SimPlan, list[Job]]]]
"""When a run was over, and for each replica its plan and who finished with it."""


class Unit:
    """Steps of `replicas`, all of them at once. jump: take runs of decode steps at once."""

    __slots__ = (
        "replicas", "cost", "window", "ahead", "jump", "_table", "free_at", "start", "pace", "wakes_at", "version",
        "num_steps", "_plans",
    )  # fmt: skip

    def __init__(
        self, replicas: Sequence[SimReplica], cost: StepCost, table: DecodeTable, *, window: int = 0,
        ahead: bool = False, jump: bool = True,
    ) -> None:  # fmt: skip
        self.replicas, self.cost, self.window, self.ahead, self.jump = tuple(replicas), cost, window, ahead, jump
        self._table = table
        self.free_at = 0.0
        """The steps planned so far are over."""
        self.start = 0.0
        """The run under way began."""
        self.pace = Pace(1, 0.0)
        """Of the run under way; one step where there is none."""
        self.wakes_at: float | None = None
        self.version = 0
        """Counts changes of `wakes_at`: an older alarm is none."""
        self.num_steps = 0
        self._plans: list[tuple[SimReplica, SimPlan]] = []

    def begin(self, now: float) -> Sequence[Job]:
        """Plan from `now` on; returns who is in a step for the first time. The alarm is `wakes_at`."""
        plans: list[tuple[SimReplica, SimPlan]] = []
        for replica in self.replicas:
            plan = replica.scheduler.schedule()
            if plan is not None:
                plans.append((replica, plan))
        released = False
        if self.ahead:
            for replica in self.replicas:
                released |= replica.scheduler.release_finished()
        self._plans = plans
        self.version += 1
        if not plans:
            self.wakes_at = self.free_at if self.free_at > now or released else None
            return []
        self.start = max(now, self.free_at)
        self.pace = self._pace(plans, released)
        self._set_alarm()
        return [job for _, plan in plans for job in plan.begun]

    def _set_alarm(self) -> None:
        pace, start = self.pace, self.start
        num, first, slope = pace.num, pace.first, pace.slope
        self.free_at = start + (num * first + slope * (num * (num - 1) / 2))
        self.wakes_at = start + pace.after(num - 1) if self.ahead else self.free_at

    def _pace(self, plans: list[tuple[SimReplica, SimPlan]], released: bool) -> Pace:
        num_steps = self._num_alike(plans, released) if self.jump else 1
        shared_rows = self._shared_rows(plans)
        first, slowest = self._slowest(plans, 0, shared_rows)
        while num_steps > 1:
            last, at_last = self._slowest(plans, num_steps - 1, shared_rows)
            if num_steps == 2 or at_last == slowest:  # the slowest of straight lines at both ends is it all between
                return Pace(num_steps, first, (last - first) / (num_steps - 1))
            num_steps = max(2, num_steps // 2)
        return Pace(1, first)

    def _shared_rows(self, plans: list[tuple[SimReplica, SimPlan]]) -> float:
        """Rows of a replica in this step, those that idle along counted: what their shared experts see."""
        idle = len(self.replicas) - len(plans)
        if len(self.replicas) == 1:
            return 0.0
        return self.cost.shared_rows([sum(plan.chunks) + plan.num_decodes for _, plan in plans] + [0] * idle)

    def _num_alike(self, plans: list[tuple[SimReplica, SimPlan]], released: bool) -> int:
        for _, plan in plans:
            if not plan.is_pure:
                return 1
        if released and any(replica.scheduler.waiting for replica in self.replicas):
            return 1
        return 1 + min([replica.scheduler.num_quiet_steps() for replica, _ in plans])

    def _slowest(
        self, plans: list[tuple[SimReplica, SimPlan]], later: int, shared_rows: float
    ) -> tuple[float, int]:
        """Seconds of the step `later` steps behind the planned one, and whose it is."""
        slowest, index = -1.0, -1
        for replica, plan in plans:
            if plan.prefills or plan.decodes:
                seconds = self.cost.seconds(work_of(plan, self.window, shared_rows))
            else:
                num = plan.num_decodes
                seconds = self._table.of(num, plan.decode_context + later * num, shared_rows)
            if seconds > slowest:
                slowest, index = seconds, replica.index
        return slowest, index

    def num_begun(self, now: float) -> int:
        """Steps of the run that were planned before `now`."""
        if self.pace.num == 1:
            return 1
        if not self.ahead:
            return self.pace.begun(now - self.start)
        return 1 if now <= self.start else min(self.pace.num, 1 + self.pace.begun(now - self.start))

    def taken_by(self, now: float, scheduler: SimScheduler) -> tuple[int, int]:
        """(tokens, blocks beyond those promised) that the run has taken by then, of one replica."""
        later = self.num_begun(now) - 1
        if not later:
            return 0, 0
        blocks = scheduler.num_taken(later) - scheduler.num_promised_taken(later)
        return later * scheduler.num_counted, blocks

    def interrupt(self, now: float) -> bool:
        """Something comes: the run ends with the last step planned by then. Whether the alarm has changed."""
        if self.pace.num == 1:
            return False
        num_steps = self.num_begun(now)
        if num_steps == self.pace.num:
            return False
        self.pace.num = num_steps
        self.version += 1
        self._set_alarm()
        return True

    def end(self) -> Ended:
        """The alarm: the run is over (with `ahead`: its last step is under way). When it is back, and who finished."""
        ended = []
        skipped = self.pace.num - 1
        self.num_steps += self.pace.num if self._plans else 0
        for replica, plan in self._plans:
            if skipped:
                replica.scheduler.skip(skipped)
            replica.note_use()
            finished = replica.scheduler.complete(plan)
            ended.append((replica, plan, finished))
        self._plans = []
        self.pace = Pace(1, 0.0)
        self.wakes_at = None
        return self.free_at, ended
