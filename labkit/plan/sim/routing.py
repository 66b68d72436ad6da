"""Who gets a request: the engine's own pools and router, asked in the middle of a run of steps.

The router looks at every replica for each request. With many of them that would be most of the work, so that least
work is then found in arrays that follow the replicas; it decides as the engine's router does, ties in turn.
`least-requests` is not the engine's: fewest running, a waiting one counting as four, as vLLM balances its ranks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy import add, ceil, divide, maximum, minimum, multiply, sqrt, subtract

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
        self._only = self._beginning[0] if len(self._beginning) == 1 and not self._decoding else None

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


class Board:
    """What replicas have to do, as columns; in a run it falls with each step planned (see `Pace.begun`)."""

    def __init__(self, replicas: Sequence[SimReplica]) -> None:
        self.replicas = replicas
        for place, replica in enumerate(replicas):
            replica.board, replica.place = self, place
        count = len(replicas)
        zeros, ones = [0.0] * count, [1.0] * count
        # An array takes one value faster than numpy's does, which looks at the same memory.
        self._load, self._each, self._start, self._slope = (array("d", zeros) for _ in range(4))
        self._num, self._half, self._square = (array("d", ones) for _ in range(3))
        columns = (self._load, self._each, self._start, self._slope, self._num, self._half, self._square)
        self._columns = tuple(np.frombuffer(column) for column in columns)
        self._lead = float(replicas[0].unit.ahead)
        """1: a step is planned when the one before it begins."""
        self._passed, self._begun = np.zeros(count), np.zeros(count)
        self._latest = 0.0
        """No run of steps begins later."""
        self._next = 0
        self._turns = np.arange(2 * count) % count / count
        """[count − next:][:count]: less than a token more for each replica that has to wait for its turn."""

    def add(self, replica: SimReplica, num_tokens: int) -> None:
        """It has so much more to do."""
        self._load[replica.place] += num_tokens

    def note(self, replica: SimReplica) -> None:
        """Its work, or the run that it is in, is another."""
        place, pace, scheduler = replica.place, replica.unit.pace, replica.scheduler
        num, load = pace.num, scheduler.ledger.load_tokens
        if num == 1:
            self._load[place], self._each[place] = load, 0.0
            return
        half, each = pace.first / 2 - pace.slope / 4, scheduler.num_counted
        self._load[place], self._each[place], self._num[place] = load + each, each, num
        start = replica.unit.start
        self._start[place], self._half[place], self._square[place] = start, half, half * half
        self._slope[place] = pace.slope / 2
        if start > self._latest:
            self._latest = start

    def choose(self, now: float) -> SimReplica:
        """The one with the least to do; of several the next in turn."""
        load, each, start, slope, num, half, square = self._columns
        passed, begun = self._passed, self._begun
        subtract(now, start, passed)
        multiply(slope, passed, begun)
        add(begun, square, begun)
        sqrt(begun, begun)
        add(begun, half, begun)
        divide(passed, begun, begun)
        ceil(begun, begun)
        if self._lead:
            add(begun, self._lead, begun)
        minimum(begun, num, out=begun)
        if now <= self._latest:  # a run has its first step from the beginning
            maximum(begun, 1.0, out=begun)
        multiply(begun, each, begun)
        subtract(load, begun, begun)
        count, turn = len(begun), self._next
        add(begun, self._turns[count - turn : 2 * count - turn], begun)
        chosen = int(begun.argmin())
        self._next = (chosen + 1) % count
        return self.replicas[chosen]
