"""The engine's scheduler, with the requests that only decode left alone until something happens to them.

A step in which everybody decodes changes nothing but numbers that follow from its count, the tick (see
`labkit.plan.sim.counting`). Whom to admit, when to preempt and everything between pools are the engine's own methods.
Where blocks may run out everybody is brought up to date, and the engine's own `schedule` and `complete` take that step.
"""

from __future__ import annotations

from bisect import bisect_left
from heapq import heappop
from operator import attrgetter
from typing import Any, cast

from labkit.engine.plan import StepPlan
from labkit.engine.request import FinishReason, Phase, Request
from labkit.engine.scheduler import SchedulerConfig
from labkit.plan.sim.counting import DECODE, PREFILL, Counting
from labkit.plan.sim.plan import SimPlan, counted
from labkit.plan.sim.pool import CountedPool, KeyedPool
from labkit.plan.sim.request import Job

FINISHED, LENGTH = Phase.FINISHED, FinishReason.LENGTH
_by_order = attrgetter("order")


class SimScheduler(Counting):
    """counts_work: whether `load_tokens` must be true at every instant (a router reads it). late: what outlives its
    expectation may be counted when something happens anyhow, and ends no run of steps.

    deferring: those that finish keep their blocks and seats until `release_finished` (the next step is planned
    before this one is back).
    """

    def __init__(
        self, config: SchedulerConfig, pool: KeyedPool | CountedPool, counts_work: bool = True, deferring: bool = False,
        late: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(config, pool, counts_work, late)
        self.deferring, self.deferred = deferring, list[Request]()
        self._largest = min(config.max_context - 1, pool.num_blocks * pool.block_size)
        """KV tokens of a request that is sure to be served."""
        self._pure = SimPlan(is_pure=True)
        """The plan of every step that is nothing but decodes: one at a time is on its way."""
        self._is_exact = False
        """By the engine's own method: the step on its way."""

    # ---- one step -------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """The engine's, which is not asked about a request that is sure to fit."""
        job = cast(Job, request)
        if not 0 < job.num_prompt <= job.final <= self._largest:
            super().add(job)  # which may refuse it
            return
        self.requests[job.id] = job
        self.waiting.append(job)
        self.ledger.enter(job)

    def schedule(self) -> SimPlan | None:
        if self.num_in_flight or not (self.running or self.waiting):
            return None
        taken = self._takers.counts[self.tick % self._size]
        if taken + (self._blocks_of_prompts() if self._prefilling else 0) > self.pool.num_free:
            return self._schedule_exactly()
        if self._outliving:
            self._expect_more()
        if self._late is not None and self._late.heap:
            self._late.catch_up(self.tick, self.ledger)
        num_counted = self.num_counted
        if num_counted:
            if taken:
                self._lend(1, taken)
            self.ledger.load_tokens -= num_counted
            self.context += num_counted
            self.tick += 1
        if self._prefilling or self.waiting:
            plan = SimPlan()
            self._add_prompts(plan)
            if not (plan.prefills or num_counted):
                return None
        elif num_counted:
            plan = self._pure
        else:
            return None
        plan.num_decodes, plan.decode_context = num_counted, self.context
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

    def _add_chunk(self, plan: StepPlan, request: Request, budget: int) -> int:
        """As the engine's does where blocks are free; where they are not it is the engine's."""
        job = cast(Job, request)
        rest = job.num_prompt + job.output.count - job.num_computed
        chunk = rest if rest < budget else budget
        if not chunk or not self.ledger.take(request, chunk):
            return super()._add_chunk(plan, request, budget)
        self.ledger.load_tokens -= chunk
        request.num_computed += chunk
        request.in_flight += 1
        plan.prefills.append(request)
        plan.chunks.append(chunk)
        plan.ends.append(request.num_computed)
        if chunk == rest:
            plan.sampled.append(request)
        return chunk

    def _blocks_of_prompts(self) -> int:
        """Blocks that those who are not through with their prompts lack."""
        size = self._size
        return sum([-(-request.num_tokens // size) - len(request.blocks) for request in self._prefilling])

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
        events, tick = self._events, self.tick
        finished: list[Any] = self._end_chunks(plan) if plan.prefills else []
        while events and events[0][0] <= tick:
            job = heappop(events)[2]
            if job.final - job.num_computed > tick - job.since:
                self._watch(job)
            else:
                finished.append(job)
                self._leave(job)
        if finished:
            running: list[Any] = self.running
            for each in finished:
                del running[bisect_left(running, each.order, key=_by_order)]
                self._finish(each, LENGTH)
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
        if len(sampled) == len(self._prefilling):
            self._prefilling = []
        else:
            self._prefilling = [request for request in self._prefilling if request.phase is PREFILL]
        return finished

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if self.deferring:
            self.deferred.append(request)
        else:
            self._free(request)

    def _free(self, request: Request) -> None:
        del self.requests[request.id]
        self.ledger.leave(request, answered=True)
        request.phase, request.finish_reason = FINISHED, LENGTH

    def release_finished(self) -> bool:
        """Whether there were any whose blocks are free now."""
        if not self.deferred:
            return False
        deferred, self.deferred = self.deferred, []
        for request in deferred:
            self._free(request)
        return True

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
        takers, free = self._takers, self.pool.num_free
        if takers.total * (num_steps // self._size + 1) <= free:
            return num_steps
        return takers.steps(self.tick, num_steps, free)

    def num_taken(self, num_steps: int) -> int:
        """Blocks that the next so many such steps take."""
        return self._takers.taken(self.tick, num_steps)

    def num_promised_taken(self, num_steps: int) -> int:
        """How many of them were promised."""
        return self._promised.taken(self.tick, num_steps) if self.ledger.reserving else 0

    def skip(self, num_steps: int) -> None:
        """So many steps like the one on its way have run behind it."""
        taken = self._takers.taken(self.tick, num_steps)
        if taken:
            self._lend(num_steps, taken)
        tokens = self.num_counted * num_steps
        self.ledger.load_tokens -= tokens
        self.context += tokens
        self.tick += num_steps
