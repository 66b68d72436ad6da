"""A replica of the simulated engine: the running engine's own, whose scheduler may be in the middle of a run."""

from __future__ import annotations

from typing import Any

from labkit.engine.replica import Replica
from labkit.engine.router import ReplicaView
from labkit.plan.sim.request import Job


class SimReplica(Replica):
    unit: Any
    """A `Unit`, or a `StagedUnit` where there are pipeline stages; each has a scheduler of its own kind."""
    scheduler: Any
    now: float = 0.0
    """The instant that a router asks at."""
    board: Any = None
    """A `Board` that a router finds it on, and its place there."""
    place: int = 0

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.unseen: list[Job] = []
        """Have come, and the scheduler has not looked since."""
        self.peak_blocks = self.used_blocks = self.waiting = 0
        self.noted_blocks = max(1, self.scheduler.pool.num_blocks // 200)
        """A change of the KV cache that is worth a note for its use over time: half a hundredth."""

    def note_load(self) -> None:
        """Its work, or the run that it is in, is another: who is asked for the least work knows."""
        if self.board is not None:
            self.board.note(self)

    def note_use(self) -> None:
        pool = self.scheduler.pool
        used = pool.num_blocks - pool.num_free
        if used > self.peak_blocks:
            self.peak_blocks = used

    def view(self, prompt: Any) -> ReplicaView:
        """As the running engine's scheduler would tell at this instant, in the middle of a run."""
        view = self.scheduler.view(prompt)
        tokens, blocks = self.unit.taken_by(self.now, self.scheduler)
        if not tokens:
            return view
        free = max(0, view.free_tokens - blocks * self.scheduler.pool.block_size)
        return ReplicaView(view.load_tokens - tokens, free, view.cached_tokens)
