"""The engine's scheduler, with the requests that only decode left alone until something happens to them.

A step in which everybody decodes changes nothing but numbers that follow from its count, the tick. So a request that
decodes carries the tick at which it began and the tick at which it ends; how many blocks all of them take at a tick is
known by what the tick leaves over when divided by the block size. Admission, chunks of prompts, promises, the end of a
request and everything between pools are the engine's own methods. Where blocks may run out everybody is brought up to
date, and the engine's own `schedule` and `complete` take that step.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any, cast

from labkit.engine.plan import StepPlan
from labkit.engine.request import FinishReason, Phase, Request
from labkit.engine.scheduler import Scheduler, SchedulerConfig
from labkit.plan.sim_pool import CountedLedger, CountedPool, KeyedLedger, KeyedPool
from labkit.plan.sim_request import Answer, Job

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
_by_order = attrgetter("order")


@dataclass(slots=True, eq=False)
class SimPlan(StepPlan):
    """A step; those that decode in it are counted where they are not listed."""

    num_decodes: int = 0
    decode_context: int = 0
    """KV tokens of all decodes together, the new ones counted."""
    is_pure: bool = False
    """Nothing but decodes that are counted: the same step may follow at once."""
    begun: list[Job] = field(default_factory=list)
    """Have just been let in, some of them anew after a preemption."""

    def __bool__(self) -> bool:
        return bool(self.prefills or self.num_decodes)


class SimScheduler(Scheduler):
    """counts_work: whether `load_tokens` must be true at every instant (a router reads it).

    deferring: those that finish keep their blocks and seats until `release_finished` (the next step is planned
    before this one is back).
    """

    def __init__(
        self, config: SchedulerConfig, pool: KeyedPool | CountedPool, counts_work: bool = True, deferring: bool = False
    ) -> None:
        super().__init__(config, pool)
        self.sim_pool = pool
        ledger = CountedLedger if isinstance(pool, CountedPool) else KeyedLedger
        self.ledger = ledger(pool, config.admission == "labkit", config.prefills_only)
        self._watches_promises = counts_work or self.ledger.reserving
        self.deferring, self.deferred = deferring, list[Request]()
        self.tick = 0
        """Steps planned so far in which requests decode uncounted."""
        self.num_counted = 0
        self.context = 0
        """KV tokens of those that decode uncounted."""
        self._takers, self._promised = [0] * pool.block_size, [0] * pool.block_size
        """How many take a block at a tick, and a promised one, by tick % block size."""
        self._events: list[tuple[int, int, Job]] = []
        """(tick at whose end something happens, order of admission, to whom)"""
        self._prefilling: list[Request] = []
        self._order = 0
        self._is_exact = False
        """The step on its way was planned by the engine's own method."""

    # ---- one step -------------------------------------------------------------------------------------

    def schedule(self) -> SimPlan | None:
        if self.num_in_flight or not (self.running or self.waiting):
            return None
        if not self._has_room():
            return self._schedule_exactly()
        plan = SimPlan(num_decodes=self.num_counted)
        if self.num_counted:
            self._advance(1)
            plan.decode_context = self.context
        budget = self.config.max_num_batched_tokens - self.num_counted
        for request in self._prefilling:
            if budget:
                budget -= self._add_chunk(plan, request, budget)
        if self.waiting:
            self._let_in(plan, budget)
        if not plan:
            return None
        plan.is_pure = not plan.prefills
        self.num_in_flight = 1
        return plan

    def _has_room(self) -> bool:
        """Whether nobody can run out of blocks in the next step."""
        needed = self._takers[self.tick % self.pool.block_size] if self.num_counted else 0
        for request in self._prefilling:
            needed += self.pool.blocks_for(request.num_tokens) - len(request.blocks)
        return needed <= self.pool.num_free

    def _let_in(self, plan: SimPlan, budget: int) -> None:
        before = len(self.running)
        self._admit(plan, budget)
        for request in self.running[before:]:
            self._order += 1
            cast(Job, request).order = self._order
            if request.phase is PREFILL:
                self._prefilling.append(request)
                plan.begun.append(cast(Job, request))

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
        context = sum(request.num_computed for request in plan.decodes)
        begun = [cast(Job, r) for r, n, end in zip(plan.prefills, plan.chunks, plan.ends, strict=True) if n + r.num_cached == end]
        return SimPlan(
            plan.prefills, plan.chunks, plan.ends, plan.sampled, plan.decodes, len(plan.decodes), context, False, begun
        )

    def complete(self, plan: StepPlan, token_ids: list[int] | None = None) -> list[Request]:
        """The step is back; returns who finished with it."""
        if self._is_exact:
            finished = super().complete(plan, [0] * len(plan.sampled))
            self._is_exact = False
            self._count_all()
            return finished
        self.num_in_flight = 0
        finished = self._end_chunks(plan) if plan.prefills else []
        events, tick = self._events, self.tick
        while events and events[0][0] <= tick:
            job = heappop(events)[2]
            if not self._outlives(job):
                finished.append(job)
                self._leave(job)
        for request in finished:
            del self.running[bisect_left(self.running, cast(Job, request).order, key=_by_order)]
            self._finish(request, FinishReason.LENGTH)
        return finished

    def _end_chunks(self, plan: StepPlan) -> list[Request]:
        for request, end in zip(plan.prefills, plan.ends, strict=True):
            request.in_flight -= 1
            self.ledger.publish(request, end)
        finished = []
        for request in plan.sampled:
            request.phase = DECODE
            request.output.append(0)
            if len(request.output) >= request.params.max_tokens:
                finished.append(request)
            elif self.config.prefills_only:
                self._hand_over(request)
            else:
                self._count(cast(Job, request))
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
        size, free = self.pool.block_size, self.pool.num_free
        if self.num_counted * (num_steps // size + 1) <= free:
            return num_steps
        rounds = min(num_steps // size, max(0, free // self.num_counted - 1))
        free -= rounds * self.num_counted
        quiet = rounds * size
        while quiet < num_steps and (free := free - self._takers[(self.tick + quiet) % size]) >= 0:
            quiet += 1
        return quiet

    def num_taken(self, num_steps: int) -> int:
        """Blocks that the next so many such steps take."""
        return self._num_taken(self._takers, num_steps, self.num_counted)

    def num_promised_taken(self, num_steps: int) -> int:
        """How many of them were promised."""
        return self._num_taken(self._promised, num_steps, sum(self._promised)) if self.ledger.reserving else 0

    def skip(self, num_steps: int) -> None:
        """So many steps like the one on its way have run behind it."""
        self._advance(num_steps)

    def _advance(self, num_steps: int) -> None:
        self.sim_pool.lend(self.num_taken(num_steps))
        if self.ledger.reserving:
            self.ledger.num_reserved -= self.num_promised_taken(num_steps)
        tokens = self.num_counted * num_steps
        self.ledger.load_tokens -= tokens
        self.context += tokens
        self.tick += num_steps

    def _num_taken(self, takers: list[int], num_steps: int, each_round: int) -> int:
        size = self.pool.block_size
        at = self.tick % size
        if num_steps == 1:
            return takers[at]
        rounds, rest = divmod(num_steps, size)
        end = at + rest
        part = sum(takers[at:end]) if end <= size else sum(takers[at:]) + sum(takers[: end - size])
        return rounds * each_round + part

    # ---- who is counted -------------------------------------------------------------------------------

    def _count(self, job: Job) -> None:
        """From the next step on it decodes uncounted."""
        size = self.pool.block_size
        job.since = self.tick
        job.slot = (self.tick - job.num_computed) % size
        self._takers[job.slot] += 1
        self.num_counted += 1
        self.context += job.num_computed
        if self.ledger.reserving and job.num_reserved:
            job.is_promised = True
            self._promised[job.slot] += 1
        job.key = -1
        if not self._outlives(job):
            raise AssertionError("a request that is counted has tokens to come")

    def _outlives(self, job: Job) -> bool:
        """Watch for what happens to it next; False: it has ended. What was expected of it may be over instead."""
        final, ledger = job.final, self.ledger
        computed = job.num_computed + self.tick - job.since
        if computed >= final:
            return False
        upcoming = final
        if self._watches_promises:
            if computed >= job.expected_tokens:
                if job.is_promised:
                    self._promised[job.slot] -= 1
                    job.is_promised, job.num_reserved = False, 0
                ledger._expect(job, ledger._whole_blocks(job, computed + 1))
            upcoming = min(final, job.expected_tokens)
        job.key = self.tick + upcoming - computed
        heappush(self._events, (job.key, job.order, job))
        return True

    def _leave(self, job: Job) -> None:
        """It has ended: what was counted for it is its own again."""
        self._takers[job.slot] -= 1
        self.num_counted -= 1
        self._bring_up_to_date(job)
        self.context -= job.num_computed

    def _bring_up_to_date(self, job: Job) -> None:
        num_steps = self.tick - job.since
        job.num_computed += num_steps
        cast(Answer, job.output).count += num_steps
        job.since = self.tick
        num_blocks = self.pool.blocks_for(job.num_computed) - len(job.blocks)
        if job.is_promised:
            self._promised[job.slot] -= 1
            job.is_promised = False
            job.num_reserved -= num_blocks
        self.sim_pool.give(job, num_blocks)

    def _settle(self) -> None:
        """Everybody is as the engine's scheduler would have it."""
        for request in self.running:
            if request.phase is DECODE:
                self._bring_up_to_date(cast(Job, request))
        size = self.pool.block_size
        self._takers, self._promised = [0] * size, [0] * size
        self.num_counted = self.context = 0
        self._events = []

    def _count_all(self) -> None:
        self._prefilling = [request for request in self.running if request.phase is PREFILL]
        for order, request in enumerate(self.running, self._order + 1):
            cast(Job, request).order = order
            if request.phase is DECODE:
                self._count(cast(Job, request))
        self._order += len(self.running)


