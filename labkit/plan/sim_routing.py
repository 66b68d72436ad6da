"""Who gets a request: the engine's own pools and router, asked in the middle of a run of steps.

The router looks at every replica for each request. With many of them that would be most of the work, so that least
work is then found in arrays that follow the replicas; it decides as the engine's router does, ties in turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labkit.engine.admission import check_fits
from labkit.engine.pools import Pools
from labkit.plan.sim_replica import SimReplica
from labkit.plan.sim_request import Job

MANY = 12
"""From so many replicas on arrays are faster than asking each."""


class Routing:
    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._decoding: Sequence[SimReplica] = pools.decoding  # type: ignore[assignment]
        self._beginning: list[SimReplica] = [
            replica for pool in pools.pools if pool.role in ("any", "prefill", "long") for replica in pool.replicas
        ]  # type: ignore[misc]
        policy = pools.policy
        plain = all(pool.role in ("any", "prefill") for pool in pools.pools if pool.role != "decode")
        self._begin = self._board(self._beginning, policy) if plain else None
        self._take_over = self._board(self._decoding, "least-work")
        self._boards: dict[int, Board] = {
            replica.index: board for board in (self._begin, self._take_over) if board for replica in board.replicas
        }
        self._only = self._beginning[0] if len(self._beginning) == 1 and not self._decoding else None

    @staticmethod
    def _board(replicas: Sequence[SimReplica], policy: str) -> Board | None:
        return Board(replicas) if len(replicas) >= MANY and policy == "least-work" else None

    def begin(self, job: Job, now: float) -> SimReplica:
        """Raises RequestRefused where no replica can ever hold it."""
        if self._only is not None:
            return self._only
        if self._begin is not None:
            for replica in self._decoding[:1]:
                check_fits(job, replica.scheduler.pool.num_blocks, replica.scheduler.pool.block_size)
            return self._begin.choose(now)
        for replica in self._beginning:
            replica.now = now
        return self._pools.begin(job)[0]  # type: ignore[return-value]

    def take_over(self, job: Job, now: float) -> SimReplica:
        if self._take_over is not None:
            return self._take_over.choose(now)
        for replica in self._decoding:
            replica.now = now
        return self._pools.take_over(job)[0]  # type: ignore[return-value]

    def changed(self, replica: SimReplica) -> None:
        """Its work, or the run that it is in, is another."""
        if self._boards and (board := self._boards.get(replica.index)) is not None:
            board.note(replica)


class Board:
    """What replicas have to do, as columns; the work of one in a run falls with each step planned."""

    def __init__(self, replicas: Sequence[SimReplica]) -> None:
        self.replicas = replicas
        self._place = {replica.index: place for place, replica in enumerate(replicas)}
        count = len(replicas)
        self._load, self._each, self._num, self._start = (np.zeros(count) for _ in range(4))
        self._half, self._square, self._slope = np.ones(count), np.ones(count), np.zeros(count)
        self._lead = np.zeros(count)
        """1 where a step is planned when the one before it begins."""
        self._next = 0

    def note(self, replica: SimReplica) -> None:
        place, unit, scheduler = self._place[replica.index], replica.unit, replica.scheduler
        pace = unit.pace
        self._load[place] = scheduler.ledger.load_tokens
        if pace.num == 1:
            self._num[place] = 0
            return
        half = pace.first - pace.slope / 2
        self._num[place], self._start[place], self._each[place] = pace.num, unit.start, scheduler.num_counted
        self._half[place], self._square[place], self._slope[place] = half, half * half, 2 * pace.slope
        self._lead[place] = unit.ahead

    def choose(self, now: float) -> SimReplica:
        passed = np.maximum(now - self._start, 0.0)
        root = np.ceil(2 * passed / (self._half + np.sqrt(np.maximum(self._square + self._slope * passed, 0.0))))
        begun = np.minimum(np.maximum(root + self._lead, 1.0), self._num) - 1
        load = self._load - self._each * np.maximum(begun, 0.0)
        places = np.flatnonzero(load == load.min())
        at = int(np.searchsorted(places, self._next))
        chosen = int(places[at] if at < len(places) else places[0])
        self._next = (chosen + 1) % len(load)
        return self.replicas[chosen]
