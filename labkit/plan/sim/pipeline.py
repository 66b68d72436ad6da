"""A simulated replica with pipeline stages: several steps on their way, each a share of those that run.

The engine's scheduler plans every step here. While the shares stay as they are (nobody comes, ends or lacks blocks)
they go round and round: then only the instants are computed, step by step, and the requests are brought up to date
when something happens. A step enters as soon as the first stage is free, and leaves behind the one before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from labkit.engine.lockstep import next_round
from labkit.engine.plan import StepPlan
from labkit.engine.request import Phase, Request
from labkit.engine.scheduler import Scheduler, SchedulerConfig
from labkit.plan.sim.cost import DecodeTable, work_of
from labkit.plan.sim.ledger import CountedLedger, KeyedLedger
from labkit.plan.sim.plan import SimPlan, counted
from labkit.plan.sim.pool import CountedPool, KeyedPool
from labkit.plan.sim.replica import SimReplica
from labkit.plan.sim.request import Answer, Job
from labkit.plan.sim.unit import Ended
from labkit.plan.work import StepCost

MAX_ROUND_STEPS = 256
"""Steps whose instants are computed ahead: an arrival may make them void."""


class StagedScheduler(Scheduler):
    """The engine's, over pools that count. counts_work: whether `load_tokens` must be true at every instant."""

    def __init__(self, config: SchedulerConfig, pool: KeyedPool | CountedPool, counts_work: bool = True) -> None:
        super().__init__(config, pool)
        ledger = CountedLedger if isinstance(pool, CountedPool) else KeyedLedger
        self.ledger = ledger(pool, config.admission == "labkit", config.prefills_only)
        self._counts_work = counts_work

    def release_finished(self) -> bool:
        return False

    def rounds(self, shares: Sequence[list[Request]]) -> int:
        """How often these shares of decodes, all on their way, go round before anything happens to one of them."""
        requests = [request for share in shares for request in share]
        resting = sum(request.phase is Phase.HANDOFF for request in self.running)
        share = -(-len(self.running) // self.config.max_in_flight)
        if len(requests) + resting != len(self.running) or max(map(len, shares)) > share:
            return 0
        num = min(request.params.max_tokens - len(request.output) for request in requests) - 1
        if self._counts_work:
            outlived = [r.expected_tokens - r.num_computed for r in requests if r.expected_tokens < cast(Job, r).final]
            num = min([num, *outlived])
        size, free = self.pool.block_size, self.pool.num_free
        while num > 0:
            needed = sum(-(-(request.num_computed + num) // size) - len(request.blocks) for request in requests)
            if needed <= free:
                return num
            num //= 2
        return 0

    def go_round(self, share: list[Request], num_rounds: int) -> None:
        """They have decoded so many more tokens, and another one is on its way."""
        for request in share:
            self.ledger.take(request, num_rounds)
            self.ledger.advance(request, num_rounds)
            cast(Answer, request.output).count += num_rounds


@dataclass(slots=True, eq=False)
class _Flight:
    end: float
    plans: list[StepPlan]
    work: SimPlan
    """Of the first of them, as it was when it was sent."""


class StagedUnit:
    """The face of a `Unit`, for replicas with stages."""

    ahead = False

    def __init__(
        self, replicas: Sequence[SimReplica], cost: StepCost, *, window: int = 0, jump: bool = True
    ) -> None:
        self.replicas, self.cost, self.window = tuple(replicas), cost, window
        self.jump = jump and len(self.replicas) == 1
        self._seconds, self._interval = DecodeTable(cost.seconds, window), DecodeTable(cost.interval, window)
        self._num_stages = self.replicas[0].scheduler.config.max_in_flight
        self._flights: deque[_Flight] = deque()
        self._entry = self._last = 0.0
        """The first stage is free; the last step sent leaves."""
        self._ends: list[float] = []
        """Of the steps of a round-about, those on their way first."""
        self._entries: list[float] = []
        self._num_rounds = 0
        """Steps of the round-about that are to be sent."""
        self.start, self.wakes_at = 0.0, cast(float | None, None)
        self.version = self.num_steps = 0

    # ---- planning

    def begin(self, now: float) -> list[Job]:
        begun: list[Job] = []
        while plans := self._plan():
            begun += self._send(plans, now)
        if self.jump and self._flights:
            self._go_round()
        self._set_alarm()
        return begun

    def _plan(self) -> list[StepPlan]:
        if len(self.replicas) > 1:
            return next_round(self.replicas)
        plan = self.replicas[0].scheduler.schedule()
        return [] if plan is None else [plan]

    def _send(self, plans: list[StepPlan], now: float) -> list[Job]:
        seconds = interval = 0.0
        works = [counted(plan) for plan in plans if plan]
        for work in works:
            sums = work_of(work, self.window)
            seconds, interval = max(seconds, self.cost.seconds(sums)), max(interval, self.cost.interval(sums))
        for replica in self.replicas:
            replica.num_in_flight += 1
        self.start = max(now, self._entry)
        self._entry = self.start + interval
        self._last = max(self.start + seconds, self._last + interval)
        self._flights.append(_Flight(self._last, plans, works[0]))
        self.num_steps += 1
        return [job for work in works for job in work.begun]

    def _set_alarm(self) -> None:
        self.version += 1
        if self._num_rounds:
            self.wakes_at = self._ends[self._num_rounds]
        else:
            self.wakes_at = self._flights[0].end if self._flights else None

    # ---- round and round

    def _go_round(self) -> None:
        scheduler = cast(StagedScheduler, self.replicas[0].scheduler)
        if any(flight.work.prefills for flight in self._flights):
            return
        rounds = scheduler.rounds([flight.plans[0].decodes for flight in self._flights])
        count = len(self._flights)
        self._num_rounds = min(rounds * count, MAX_ROUND_STEPS)
        self._ends = ends = [flight.end for flight in self._flights]
        self._entries = [self._entry]
        shares = [(flight.work.num_decodes, flight.work.decode_context) for flight in self._flights]
        for step in range(self._num_rounds):
            num, context = shares[step % count]
            context += num * (step // count + 1)
            start = max(ends[step], self._entry)
            interval = self._interval.of(num, context)
            self._entries.append(start + interval)
            self._entry = self._entries[-1]
            ends.append(max(start + self._seconds.of(num, context), ends[-1] + interval))
        self._last = ends[-1]

    def num_begun(self, now: float) -> int:
        """1 + the steps of the round-about sent before `now`."""
        return 1 + min(self._num_rounds, bisect_left(self._ends, now)) if self._num_rounds else 1

    def taken_by(self, now: float, scheduler: StagedScheduler) -> tuple[int, int]:
        """(tokens, blocks beyond those promised) of those steps."""
        sent, count = self.num_begun(now) - 1, len(self._flights)
        if not sent:
            return 0, 0
        tokens = blocks = 0
        size = scheduler.pool.block_size
        for place, flight in enumerate(self._flights):
            rounds = len(range(place, sent, count))
            tokens += rounds * flight.work.num_decodes
            for request in flight.plans[0].decodes:
                taken = -(-(request.num_computed + rounds) // size) - len(request.blocks)
                blocks += max(0, taken - request.num_reserved)
        return tokens, blocks

    def interrupt(self, now: float) -> bool:
        """Something comes: a step is planned at once where another may be on its way."""
        num_steps = self.num_begun(now) - 1
        if num_steps < self._num_rounds:
            self._entry = self._entries[num_steps]
            self._num_rounds = num_steps
            self._last = self._ends[num_steps + len(self._flights) - 1]
            self._set_alarm()
        elif len(self._flights) == self._num_stages:
            return False
        if len(self._flights) < self._num_stages:
            self._bring_up_to_date()
            self.version += 1
            self.wakes_at = now
        return True

    def _bring_up_to_date(self) -> None:
        """What the round-about has done so far is the requests' own."""
        sent, count = self._num_rounds, len(self._flights)
        if not sent:
            return
        scheduler = cast(StagedScheduler, self.replicas[0].scheduler)
        for place, flight in enumerate(self._flights):
            rounds = len(range(place, sent, count))
            if rounds:
                scheduler.go_round(flight.plans[0].decodes, rounds)
                flight.work.decode_context += rounds * flight.work.num_decodes
        for place, flight in enumerate(self._flights):
            flight.end = self._ends[place + -(-(sent - place) // count) * count]
        self._flights.rotate(-(sent % count))
        self.num_steps += sent
        self._num_rounds = 0

    # ---- the end of a step

    def end(self) -> Ended:
        due, self.wakes_at = self.wakes_at, None
        self._bring_up_to_date()
        if not self._flights or due is not None and self._flights[0].end > due:
            return 0.0, []
        flight = self._flights.popleft()
        ended = []
        for replica, plan in zip(self.replicas, flight.plans, strict=True):
            replica.num_in_flight -= 1
            replica.note_use()
            if plan:
                finished = replica.scheduler.complete(plan, [0] * len(plan.sampled))
                ended.append((replica, cast(SimPlan, plan), cast("list[Job]", finished)))
        return flight.end, ended

