"""A replica of the simulated engine: the running engine's own, whose scheduler may be in the middle of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labkit.engine.replica import Replica
from labkit.engine.router import ReplicaView
from labkit.plan.sim_request import Job
from labkit.plan.sim_scheduler import SimScheduler

if TYPE_CHECKING:
    from labkit.plan.sim_unit import Unit


class SimReplica(Replica):
    unit: Unit
    scheduler: SimScheduler
    now: float = 0.0
    """The instant that a router asks at."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.unseen: list[Job] = []
        """Have come, and the scheduler has not looked since."""
        self.peak_blocks = self.used_blocks = self.waiting = 0

    def note_use(self) -> None:
        pool = self.scheduler.pool
        used = pool.num_blocks - pool.num_free
        if used > self.peak_blocks:
            self.peak_blocks = used

    def view(self, prompt: Any) -> ReplicaView:
        """As the running engine's scheduler would tell at this instant, in the middle of a run."""
        view = self.scheduler.view(prompt)
        later = self.unit.num_begun(self.now) - 1 if self.unit.pace.num > 1 else 0
        if not later:
            return view
        scheduler = self.scheduler
        taken = scheduler.num_taken(later) - scheduler.num_promised_taken(later)
        free = max(0, view.free_tokens - taken * scheduler.pool.block_size)
        return ReplicaView(view.load_tokens - later * scheduler.num_counted, free, view.cached_tokens)
