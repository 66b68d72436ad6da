"""Who gets a request: the engine's own pools and router, asked in the middle of a run of steps.

The router looks at every replica for each request. With many of them that would be most of the work, so that least
work is then found in arrays that follow the replicas; it decides as the engine's router does, ties in turn.
`least-requests` is not the engine's: fewest running, a waiting one counting as four, as vLLM balances its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from labkit.engine.admission import check_fits
from labkit.engine.pools import Pools
from labkit.engine.router import POLICIES as ENGINE_POLICIES
from labkit.plan.sim.pipeline import StagedUnit
from labkit.plan.sim.replica import SimReplica
from labkit.plan.sim.request import Job

POLICIES = (*ENGINE_POLICIES, "least-requests")
MANY = 12
"""From so many replicas on arrays are faster than asking each."""


class Routing:
    """by_count: new requests go by `least-requests`."""

    def __init__(self, pools: Pools, by_count: bool = False) -> None:
        self._pools, self._by_count, self._next = pools, by_count, 0
        self._decoding = cast(Sequence[SimReplica], pools.decoding)
        beginning = [r for pool in pools.pools if pool.role in ("any", "prefill", "long") for r in pool.replicas]
        self._beginning = cast(list[SimReplica], beginning)
        policy = pools.policy
        plain = all(pool.role in ("any", "prefill") for pool in pools.pools if pool.role != "decode")
        self._begin = self._board(self._beginning, policy) if plain else None
        self._take_over = self._board(self._decoding, "least-work")
        self._boards: dict[int, Board] = {
            replica.index: board for board in (self._begin, self._take_over) if board for replica in board.replicas
        }
        self._only = self._beginning[0] if len(self._beginning) == 1 and not self._decoding else None

    @property
    def has_boards(self) -> bool:
        return bool(self._boards)

    @staticmethod
    def _board(replicas: Sequence[SimReplica], policy: str) -> Board | None:
        staged = any(isinstance(replica.unit, StagedUnit) for replica in replicas)
        return Board(replicas) if len(replicas) >= MANY and policy == "least-work" and not staged else None

    def begin(self, job: Job, now: float) -> SimReplica:
        """Raises RequestRefused where no replica can ever hold it."""
        if self._only is not None:
            return self._only
        if self._by_count:
            return self._fewest()
        if self._begin is not None:
            for replica in self._decoding[:1]:
                check_fits(job, replica.scheduler.pool.num_blocks, replica.scheduler.pool.block_size)
            return self._begin.choose(now)
        for replica in self._beginning:
            replica.now = now
        return cast(SimReplica, self._pools.begin(job)[0])

    def _fewest(self) -> SimReplica:
        replicas = self._beginning
        order = [(self._next + i) % len(replicas) for i in range(len(replicas))]
        chosen = min(order, key=lambda i: 4 * replicas[i].scheduler.num_waiting + replicas[i].scheduler.num_running)
        self._next = (chosen + 1) % len(replicas)
        return replicas[chosen]

    def take_over(self, job: Job, now: float) -> SimReplica:
        if self._take_over is not None:
            return self._take_over.choose(now)
        for replica in self._decoding:
            replica.now = now
        return cast(SimReplica, self._pools.take_over(job)[0])

    def changed(self, replica: SimReplica) -> None:
        """Its work, or the run that it is in, is another."""
        if self._boards and (board := self._boards.get(replica.index)) is not None:
            board.note(replica)


class Board:
    """What replicas have to do, as columns; in a run it falls with each step planned (see `Pace.begun`)."""

    def __init__(self, replicas: Sequence[SimReplica]) -> None:
        self.replicas = replicas
        self._place = {replica.index: place for place, replica in enumerate(replicas)}
        count = len(replicas)
        self._load, self._each, self._start, self._slope = (np.zeros(count) for _ in range(4))
        self._num, self._half, self._square = (np.ones(count) for _ in range(3))
        self._lead = float(replicas[0].unit.ahead)
        """1: a step is planned when the one before it begins."""
        self._passed, self._begun = np.zeros(count), np.zeros(count)
        self._next = 0

    def note(self, replica: SimReplica) -> None:
        place, unit, scheduler = self._place[replica.index], replica.unit, replica.scheduler
        pace, load = unit.pace, scheduler.ledger.load_tokens
        if pace.num == 1:
            self._load[place], self._each[place], self._num[place] = load, 0.0, 1.0
            return
        half, each = pace.first / 2 - pace.slope / 4, scheduler.num_counted
        self._load[place], self._each[place], self._num[place] = load + each, each, pace.num
        self._start[place], self._half[place], self._square[place] = unit.start, half, half * half
        self._slope[place] = pace.slope / 2

    def choose(self, now: float) -> SimReplica:
        passed, begun = self._passed, self._begun
        np.subtract(now, self._start, out=passed)
        np.multiply(self._slope, passed, out=begun)
        begun += self._square
        np.sqrt(begun, out=begun)
        begun += self._half
        np.divide(passed, begun, out=begun)
        np.ceil(begun, out=begun)
        if self._lead:
            begun += self._lead
        np.minimum(begun, self._num, out=begun)
        np.maximum(begun, 1.0, out=begun)
        begun *= self._each
        load = np.subtract(self._load, begun, out=begun)
        turn = self._next
        chosen = turn + int(load[turn:].argmin())
        before = int(load[:turn].argmin()) if turn else chosen
        if load[before] < load[chosen]:
            chosen = before
        self._next = (chosen + 1) % len(load)
        return self.replicas[chosen]
