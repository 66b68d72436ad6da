"""The engine's scheduler, with the requests that only decode left alone until something happens to them.

A step in which everybody decodes changes nothing but numbers that follow from its count, the tick. So a request that
decodes carries the tick at which it began and the tick at which it ends; how many blocks all of them take at a tick is
known by what the tick leaves over when divided by the block size. Admission, chunks of prompts, promises, the end of a
request and everything between pools are the engine's own methods. Where blocks may run out everybody is brought up to
date, and the engine's own `schedule` and `complete` take that step.
"""

from __future__ import annotations

from bisect import bisect_left
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any, cast

from labkit.engine.plan import StepPlan
from labkit.engine.request import FinishReason, Phase, Request
from labkit.engine.scheduler import Scheduler, SchedulerConfig
from labkit.plan.sim.late import Late
from labkit.plan.sim.plan import SimPlan, counted
from labkit.plan.sim.pool import CountedLedger, CountedPool, KeyedLedger, KeyedPool
from labkit.plan.sim.request import Job
from labkit.plan.sim.takers import Takers

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
_by_order = attrgetter("order")


class SimScheduler(Scheduler):
    """counts_work: whether `load_tokens` must be true at every instant (a router reads it). late: what outlives its
    expectation may be counted when something happens anyhow, and ends no run of steps.

    deferring: those that finish keep their blocks and seats until `release_finished` (the next step is planned
    before this one is back).
    """

    def __init__(
        self, config: SchedulerConfig, pool: KeyedPool | CountedPool, counts_work: bool = True, deferring: bool = False,
        late: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(config, pool)
        self.sim_pool = pool
        ledger = CountedLedger if isinstance(pool, CountedPool) else KeyedLedger
        self.ledger = ledger(pool, config.admission == "labkit", config.prefills_only)
        self.ledger.expects = counts_work or self.ledger.reserving
        self._watches_promises = counts_work and not late or self.ledger.reserving
        self._late = Late() if late and not self._watches_promises else None
        self.deferring, self.deferred = deferring, list[Request]()
        self.tick = 0
        """Steps planned in which requests decode uncounted."""
        self.num_counted = 0
        self.context = 0
        """KV tokens of those that decode uncounted."""
        self._takers, self._promised = Takers(pool.block_size), Takers(pool.block_size)
        """Who takes a block, and a promised one."""
        self._events: list[tuple[int, int, Job]] = []
        """(tick at whose end something happens, order of admission, to whom)"""
        self._outliving: list[Job] = []
        self._prefilling: list[Request] = []
        self._order = 0
        self._pure = SimPlan(is_pure=True)
        """The plan of every step that is nothing but decodes: one at a time is on its way."""
        self._is_exact = False
        """By the engine's own method: the step on its way."""

    # ---- one step -------------------------------------------------------------------------------------

    def schedule(self) -> SimPlan | None:
        if self.num_in_flight or not (self.running or self.waiting):
            return None
        if not self._has_room():
            return self._schedule_exactly()
        is_pure = not (self._prefilling or self.waiting)
        plan = self._pure if is_pure else SimPlan()
        plan.num_decodes = self.num_counted
        if self._outliving:
            self._expect_more()
        if self._late:
            self._late.catch_up(self.tick, self.ledger)
        if self.num_counted:
            self._advance(1)
            plan.decode_context = self.context
        if not is_pure:
            self._add_prompts(plan)
        if not plan:
            return None
        self.num_in_flight = 1
        return plan

    def _add_prompts(self, plan: SimPlan) -> None:
        budget = self.config.max_num_batched_tokens - self.num_counted
        for request in self._prefilling:
            if budget:
                budget -= self._add_chunk(plan, request, budget)
        if self.waiting:
            self._let_in(plan, budget)
        plan.is_pure = not plan.prefills

    def _has_room(self) -> bool:
        """Whether nobody can run out of blocks in the next step."""
        needed = self._takers.taken(self.tick, 1)
        for request in self._prefilling:
            needed += self.pool.blocks_for(request.num_tokens) - len(request.blocks)
        return needed <= self.pool.num_free

    def _let_in(self, plan: SimPlan, budget: int) -> None:
        before = len(self.running)
        self._admit(plan, budget)
        newcomers: list[Any] = self.running[before:]
        for job in newcomers:
            self._order += 1
            job.order = self._order
            if job.phase is PREFILL:
                self._prefilling.append(job)
                plan.begun.append(job)

    @property
    def _num_seats(self) -> int:
        return self.config.max_num_seqs - len(self.running) - len(self.deferred)

    def _schedule_exactly(self) -> SimPlan | None:
        self._settle()
        plan = super().schedule()
        if plan is None:
            self._count_all()
            return None
        self._is_exact = True
        return counted(plan)

    def complete(self, plan: StepPlan, token_ids: list[int] | None = None) -> list[Request]:
        """The step is back; returns who finished with it."""
        if self._is_exact:
            self._is_exact = False
            ended = super().complete(plan, [0] * len(plan.sampled))
            self._count_all()
            return ended
        self.num_in_flight = 0
        finished: list[Any] = self._end_chunks(plan) if plan.prefills else []
        events, tick = self._events, self.tick
        while events and events[0][0] <= tick:
            job = heappop(events)[2]
            if not self._watch(job):
                finished.append(job)
                self._leave(job)
        running: list[Any] = self.running
        for each in finished:
            del running[bisect_left(running, each.order, key=_by_order)]
            self._finish(each, FinishReason.LENGTH)
        return finished

    def _end_chunks(self, plan: StepPlan) -> list[Request]:
        for request, end in zip(plan.prefills, plan.ends, strict=True):
            request.in_flight -= 1
            self.ledger.publish(request, end)
        finished = []
        sampled: list[Any] = plan.sampled
        for job in sampled:
            job.phase = DECODE
            job.output.count += 1
            if job.output.count >= job.params.max_tokens:
                finished.append(job)
            elif self.config.prefills_only:
                self._hand_over(job)
            else:
                self._count(job)
        self._prefilling = [request for request in self._prefilling if request.phase is PREFILL]
        return finished

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if self.deferring:
            self.deferred.append(request)
        else:
            super()._finish(request, reason)

    def release_finished(self) -> bool:
        """Whether there were any whose blocks are free now."""
        deferred, self.deferred = self.deferred, []
        for request in deferred:
            super()._finish(request, FinishReason.LENGTH)
        return bool(deferred)

    def landed(self, request: Request) -> None:
        super().landed(request)
        if not self._is_exact:
            self._count(cast(Job, request))

    # ---- many steps at once ---------------------------------------------------------------------------

    def num_quiet_steps(self) -> int:
        """How many steps like the pure one on its way may follow it before anything happens."""
        num_steps = self._events[0][0] - self.tick
        if num_steps <= 0 or self._prefilling:
            return 0
        return self._takers.steps(self.tick, num_steps, self.pool.num_free)

    def num_taken(self, num_steps: int) -> int:
        """Blocks that the next so many such steps take."""
        return self._takers.taken(self.tick, num_steps)

    def num_promised_taken(self, num_steps: int) -> int:
        """How many of them were promised."""
        return self._promised.taken(self.tick, num_steps) if self.ledger.reserving else 0

    def skip(self, num_steps: int) -> None:
        """So many steps like the one on its way have run behind it."""
        self._advance(num_steps)

    def _advance(self, num_steps: int) -> None:
        self.sim_pool.lend(self._takers.taken(self.tick, num_steps))
        if self.ledger.reserving:
            self.ledger.num_reserved -= self.num_promised_taken(num_steps)
        tokens = self.num_counted * num_steps
        self.ledger.load_tokens -= tokens
        self.context += tokens
        self.tick += num_steps

    # ---- who is counted -------------------------------------------------------------------------------

    def _count(self, job: Job) -> None:
        """From the next step on it decodes uncounted."""
        size = self.pool.block_size
        job.since = self.tick
        job.slot = (self.tick - job.num_computed) % size
        self._takers.add(job.slot)
        self.num_counted += 1
        self.context += job.num_computed
        if self.ledger.reserving and job.num_reserved:
            job.is_promised = True
            self._promised.add(job.slot)
        self._watch(job)
        if self._late is not None:
            self._late.add(job)

    def _watch(self, job: Job) -> bool:
        """Look at it again when more happens to it than a token; False: it has ended."""
        computed = job.num_computed + self.tick - job.since
        upcoming = job.final
        if computed >= upcoming:
            return False
        if self._watches_promises and job.expected_tokens < upcoming:
            upcoming = job.expected_tokens
            if computed >= upcoming:
                self._outliving.append(job)
                return True
        heappush(self._events, (self.tick + upcoming - computed, job.order, job))
        return True

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
        self._takers.remove(job.slot)
        self.num_counted -= 1
        self._bring_up_to_date(job)
        job.slot = -1
        self.context -= job.num_computed

    def _bring_up_to_date(self, job: Job) -> None:
        num_steps = self.tick - job.since
        job.num_computed += num_steps
        answer: Any = job.output
        answer.count += num_steps
        job.since = self.tick
        num_blocks = -(-job.num_computed // self.pool.block_size) - len(job.blocks)
        if job.is_promised:
            self._promised.remove(job.slot)
            job.is_promised = False
            job.num_reserved -= num_blocks
        self.sim_pool.give(job, num_blocks)

    def _settle(self) -> None:
        """Everybody is as the engine's scheduler would have it."""
        for request in self.running:
            if request.phase is DECODE:
                self._bring_up_to_date(cast(Job, request))
        self._takers, self._promised = Takers(self.pool.block_size), Takers(self.pool.block_size)
        self.num_counted = self.context = 0
        self._events, self._outliving = [], []
        if self._late is not None:
            self._late = Late()

    def _count_all(self) -> None:
        self._prefilling = [request for request in self.running if request.phase is PREFILL]
        for order, request in enumerate(self.running, self._order + 1):
            cast(Job, request).order = order
            if request.phase is DECODE:
                self._count(cast(Job, request))
        self._order += len(self.running)

