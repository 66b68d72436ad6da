"""Requests that decode, left alone and counted together: the part of the simulated scheduler that knows them.

A request that decodes carries the tick at which it began and the tick at which it ends; how many blocks all of them
take at a tick is known by what the tick leaves over when divided by the block size.
"""

from __future__ import annotations

from heapq import heappush
from typing import Any, cast

from labkit.engine.request import Phase, Request
from labkit.engine.scheduler import Scheduler, SchedulerConfig
from labkit.plan.sim.late import Late
from labkit.plan.sim.ledger import CountedLedger, KeyedLedger
from labkit.plan.sim.pool import CountedPool, KeyedPool
from labkit.plan.sim.request import Job
from labkit.plan.sim.takers import Takers

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE


class Counting(Scheduler):
    """counts_work, late: as in `labkit.plan.sim.scheduler`, which makes steps of it."""

    pool: KeyedPool | CountedPool
    ledger: CountedLedger | KeyedLedger

    def __init__(self, config: SchedulerConfig, pool: KeyedPool | CountedPool, counts_work: bool, late: bool) -> None:
        super().__init__(config, pool)
        ledger = CountedLedger if isinstance(pool, CountedPool) else KeyedLedger
        self.ledger = ledger(pool, config.admission == "labkit", config.prefills_only)
        self.ledger.expects = counts_work or self.ledger.reserving
        self._watches_promises = counts_work and not late or self.ledger.reserving
        self._late = Late() if late and not self._watches_promises else None
        self.tick = 0
        """Steps planned in which requests decode uncounted."""
        self.num_counted = 0
        self.context = 0
        """KV tokens of those that decode uncounted."""
        self._size = pool.block_size
        self._takers, self._promised = Takers(pool.block_size), Takers(pool.block_size)
        """Who takes a block, and a promised one."""
        self._events: list[tuple[int, int, Job]] = []
        """(tick at whose end something happens, order of admission, to whom)"""
        self._outliving: list[Job] = []
        self._prefilling: list[Request] = []
        self._order = 0

    def _lend(self, num_steps: int, num_blocks: int) -> None:
        """The blocks that so many steps from here on take, some of which were promised."""
        self.pool.lend(num_blocks)
        if self.ledger.reserving:
            self.ledger.num_reserved -= self._promised.taken(self.tick, num_steps)

    def _count(self, job: Job) -> None:
        """From the next step on it decodes uncounted."""
        tick, computed = self.tick, job.num_computed
        job.since = tick
        job.slot = slot = (tick - computed) % self._size
        takers = self._takers
        takers.counts[slot] += 1
        takers.total += 1
        self.num_counted += 1
        self.context += computed
        if job.num_reserved:
            job.is_promised = True
            self._promised.add(slot)
        self._watch(job)
        if self._late is not None:
            self._late.add(job)

    def _watch(self, job: Job) -> None:
        """Look at it again when more happens to it than a token; it has not ended."""
        upcoming = job.final
        if self._watches_promises and job.expected_tokens < upcoming:
            upcoming = job.expected_tokens
            if job.num_computed + self.tick - job.since >= upcoming:
                self._outliving.append(job)
                return
        heappush(self._events, (job.since + upcoming - job.num_computed, job.order, job))

    def _expect_more(self) -> None:
        """Those that outlive what was expected of them take a block that was not promised in the next step."""
        outliving, self._outliving = self._outliving, []
        for job in outliving:
            if job.is_promised:
                self._promised.remove(job.slot)
                job.is_promised, job.num_reserved = False, 0
            computed = job.num_computed + self.tick - job.since
            self.ledger.expect_block(job, computed + 1)
            self._watch(job)

    def _leave(self, job: Job) -> None:
        """It has ended: what was counted for it is its own again."""
        takers = self._takers
        takers.counts[job.slot] -= 1
        takers.total -= 1
        self.num_counted -= 1
        self._bring_up_to_date(job)
        job.slot = -1
        self.context -= job.num_computed

    def _bring_up_to_date(self, job: Job) -> None:
        tick = self.tick
        num_steps = tick - job.since
        job.num_computed = computed = job.num_computed + num_steps
        job.output.count += num_steps
        job.since = tick
        num_blocks = -(-computed // self._size) - len(job.blocks)
        if job.is_promised:
            self._promised.remove(job.slot)
            job.is_promised = False
            job.num_reserved -= num_blocks
        if num_blocks:
            self.pool.give(job, num_blocks)

    def _settle(self) -> None:
        """Everybody is as the engine's scheduler would have it."""
        for request in self.running:
            if request.phase is DECODE:
                self._bring_up_to_date(cast(Job, request))
        self._takers, self._promised = Takers(self._size), Takers(self._size)
        self.num_counted = self.context = 0
        self._events, self._outliving = [], []
        if self._late is not None:
            self._late = Late()

    def _count_all(self) -> None:
        self._prefilling = [request for request in self.running if request.phase is PREFILL]
        running: list[Any] = self.running
        for order, job in enumerate(running, self._order + 1):
            job.order = order
            if job.phase is DECODE:
                self._count(job)
        self._order += len(running)
