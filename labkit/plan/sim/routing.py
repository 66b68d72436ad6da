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
    """What replicas have to do, as columns. In a run of steps it falls with each step that is planned, about as a
    straight line does: those that the line leaves in question are asked.
    """

    def __init__(self, replicas: Sequence[SimReplica]) -> None:
        self.replicas = replicas
        for place, replica in enumerate(replicas):
            replica.board, replica.place = self, place
        count = len(replicas)
        self._least, self._since, self._fall = (np.zeros(count) for _ in range(3))
        """No replica has less to do than `least` − `fall` · (now − `since`)."""
        self._ahead = replicas[0].unit.ahead
        self._line, self._is_near = np.zeros(count), np.zeros(count, bool)
        self._next = 0

    def note(self, replica: SimReplica) -> None:
        """Its work, or the run that it is in, is another."""
        place, unit, scheduler = replica.place, replica.unit, replica.scheduler
        pace, load = unit.pace, scheduler.ledger.load_tokens
        if pace.num == 1:
            self._least[place], self._fall[place] = load, 0.0
            return
        tokens, shortest = scheduler.num_counted, min(pace.first, pace.after(pace.num) - pace.after(pace.num - 1))
        if shortest <= 0:
            self._least[place], self._fall[place] = load - pace.num * tokens, 0.0
            return
        self._least[place] = load - tokens if self._ahead else load
        self._since[place], self._fall[place] = unit.start, tokens / shortest

    def choose(self, now: float) -> SimReplica:
        """The one with the least to do; of several the next in turn."""
        line, near = self._line, self._is_near
        np.subtract(now, self._since, out=line)
        if self._ahead:  # the run may be planned, and not begun
            np.maximum(line, 0.0, out=line)
        np.multiply(line, self._fall, out=line)
        np.subtract(self._least, line, out=line)
        chosen = int(line.argmin())
        least = self._load(chosen, now)
        np.less_equal(line, least + 0.5, out=near)  # loads are whole numbers, and a line is rounded
        places = near.nonzero()[0]
        if len(places) > 1:
            turn, count = self._next, len(self.replicas)
            chosen = min(places.tolist(), key=lambda place: (self._load(place, now), (place - turn) % count))
        self._next = (chosen + 1) % len(self.replicas)
        return self.replicas[chosen]

    def _load(self, place: int, now: float) -> int:
        replica = self.replicas[place]
        tokens: int = replica.scheduler.ledger.load_tokens
        return tokens - (replica.unit.num_begun(now) - 1) * replica.scheduler.num_counted
