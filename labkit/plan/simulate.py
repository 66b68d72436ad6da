"""What would happen: requests arrive on a virtual clock, and the engine's own router and schedulers take them.

Only three things happen: a request arrives, a run of steps is over, the KV of a request has landed in another pool.
Between them time is skipped. What a step takes is asked of a cost model; everything else is the engine's doing.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import inf, nan
from typing import Any

import numpy as np

from labkit.engine.request import RequestRefused
from labkit.layout.deployment import AnyLayout
from labkit.plan.sim.handoff import Handoffs
from labkit.plan.sim.replica import SimReplica
from labkit.plan.sim.request import Job, SimRequest
from labkit.plan.sim.result import Series, SimResult
from labkit.plan.sim.routing import POLICIES, Routing
from labkit.plan.sim.setup import AnyUnit, Options, set_up
from labkit.plan.work import EngineSettings, StepCost

__all__ = ["Options", "SimRequest", "SimResult", "simulate"]

_ARRIVAL, _ADOPTION, _LANDING, _ALARM = range(4)
"""In this order at one instant: a plan is made when everybody has come."""
_PROGRESS_EVERY = 2000


def simulate(
    requests: Sequence[SimRequest], layout: AnyLayout, cost: StepCost | Mapping[str, StepCost],
    kv_blocks: int | Mapping[str, int], settings: EngineSettings, *, concurrency: int = 0,
    options: Options | None = None, routing: str = "", on_progress: Callable[[int], None] | None = None,
    frontend_s: Sequence[float] | None = None,
) -> SimResult:  # fmt: skip
    """Serve `requests` in their order of arrival.

    cost, kv_blocks: of one replica; by role where pools differ. concurrency: above 0, a closed loop with so many in
    flight, which looks at no arrivals. on_progress: called with the number that have finished, now and then.
    frontend_s: of each request, from its arrival until it is at the router; without it none takes any time.
    """
    options = options or Options()
    if routing:
        options = replace(options, routing=routing)
    if settings.enable_prefix_caching and not options.shares and any(request.block_ids for request in requests):
        options = replace(options, shares=True)
    if options.routing not in POLICIES:
        raise ValueError(f"Routing {options.routing!r} is unknown: choose one of {', '.join(POLICIES)}.")
    if not requests:
        raise ValueError("There is nothing to simulate: give at least one request.")
    late = [0.0] * len(requests) if frontend_s is None else list(frontend_s)
    simulation = _Simulation(requests, layout, cost, kv_blocks, settings, concurrency, options, on_progress, late)
    collecting = gc.isenabled()
    gc.disable()  # nothing here makes cycles, and looking for them among a million requests takes longer than they do
    try:
        return simulation.run()
    finally:
        if collecting:
            gc.enable()


class _Simulation:
    def __init__(
        self, requests: Sequence[SimRequest], layout: AnyLayout, cost: StepCost | Mapping[str, StepCost],
        kv_blocks: int | Mapping[str, int], settings: EngineSettings, concurrency: int, options: Options,
        on_progress: Callable[[int], None] | None, frontend_s: list[float],
    ) -> None:  # fmt: skip
        self.requests, self.concurrency, self.on_progress = requests, concurrency, on_progress
        self.frontend = frontend_s
        self.counted, self.ahead = not options.shares, options.ahead
        self.pools, self.units = set_up(layout, cost, kv_blocks, settings, options)
        self.routing = Routing(self.pools, options.routing == "least-requests")
        self.handoffs = Handoffs(cost)
        count = len(requests)
        self.arrival = [request.arrival_s for request in requests]
        never = array("d", [nan])
        self.seen, self.begun, self.first, self.finished = (never * count for _ in range(4))
        self.replica = array("i", [-1]) * count
        self.refused: dict[int, str] = {}
        self.num_finished = self.cached_tokens = 0
        self.waiting, self.kv_blocks = Series(), Series()
        self._heap: list[tuple[float, int, int, Any, Any]] = []
        self._number = 0
        self._next_arrival = inf
        self._next = 0
        """In a closed loop: who is sent next."""

    # ---- the clock

    def run(self) -> SimResult:
        if self.concurrency:
            self._run_closed()
        else:
            self._run_open()
        return self._result()

    def _run_open(self) -> None:
        reached = [at + late for at, late in zip(self.arrival, self.frontend, strict=True)]
        requests, heap, counted = self.requests, self._heap, self.counted
        for index in np.argsort(reached, kind="stable").tolist():
            self._next_arrival = at = reached[index]
            while heap and heap[0][0] < at:
                self._happen()
            self._arrive(Job(index, requests[index], counted), at)
        self._next_arrival = inf
        while heap:
            self._happen()

    def _run_closed(self) -> None:
        for _ in range(min(self.concurrency, len(self.requests))):
            self._send_next(0.0)
        while self._heap:
            self._happen()

    def _send_next(self, now: float) -> None:
        if self._next < len(self.requests):
            index = self._next
            self._next += 1
            self.arrival[index] = now
            self._push(now + self.frontend[index], _ARRIVAL, Job(index, self.requests[index], self.counted), None)

    def _send_free(self, unit: AnyUnit, now: float) -> None:
        """Who is sent because others have finished now comes before the unit plans on."""
        unit.wakes_at = now
        for replica in unit.replicas:
            replica.note_load()
        while self._heap and self._heap[0][:2] == (now, _ARRIVAL):
            self._happen()

    def _push(self, at: float, kind: int, what: Any, more: Any) -> None:
        self._number += 1
        heappush(self._heap, (at, kind, self._number, what, more))

    def _happen(self) -> None:
        now, kind, _, what, more = heappop(self._heap)
        if kind == _ALARM:
            if what.version == more:
                self._go_on(what, now)
        elif kind == _ARRIVAL:
            self._arrive(what, now)
        elif kind == _ADOPTION:
            self._adopt(what, more, now)
        else:
            self._land(what, more, now)

    # ---- what happens

    def _arrive(self, job: Job, now: float) -> None:
        index = job.index
        try:
            replica = self.routing.begin(job, now)
            replica.scheduler.add(job)
        except RequestRefused as refusal:
            self.refused[index] = str(refusal)
            if self.concurrency:
                self._send_next(now)
            return
        self.replica[index] = replica.index
        self.waiting.add(now, 1)
        replica.waiting += 1
        if replica.board is not None:
            replica.board.add(replica, job.expected_tokens)
        if self.ahead:
            replica.unseen.append(job)
        else:
            self.seen[index] = now
        self._stir(replica.unit, now)

    def _stir(self, unit: AnyUnit, now: float) -> None:
        """Something has come to one of its replicas."""
        if unit.wakes_at is None:
            unit.wakes_at = now
            unit.version += 1
            self._push(now, _ALARM, unit, unit.version)
        elif unit.interrupt(now):
            self._push(unit.wakes_at, _ALARM, unit, unit.version)

    def _go_on(self, unit: AnyUnit, now: float) -> None:
        """Its alarm, and all that follow before something else happens."""
        heap, begun = self._heap, self.begun
        while True:
            end, ended = unit.end()
            for replica, plan, finished in ended:
                if finished or plan.prefills:
                    self._note(replica, plan, finished, end)
            if self.concurrency and end <= now:
                self._send_free(unit, now)
            for job in unit.begin(now):
                before = begun[job.index]
                if before != before:
                    begun[job.index] = unit.start
                    self.cached_tokens += job.num_cached
            for replica in unit.replicas:
                self._look_at(replica, now)
            at = unit.wakes_at
            if at is None:
                return
            if at >= self._next_arrival or (heap and at >= heap[0][0]):
                self._number += 1
                heappush(heap, (at, _ALARM, self._number, unit, unit.version))
                return
            now = at

    def _look_at(self, replica: SimReplica, now: float) -> None:
        """What has become of its queue and its room, and what it sends."""
        scheduler = replica.scheduler
        if replica.unseen:
            for job in replica.unseen:
                self.seen[job.index] = now
            replica.unseen = []
        pool, waiting = scheduler.pool, len(scheduler.waiting)
        if waiting != replica.waiting:
            self.waiting.add(now, waiting - replica.waiting)
            replica.waiting = waiting
        used = pool.num_blocks - pool.num_free
        change = used - replica.used_blocks
        if change >= replica.noted_blocks or -change >= replica.noted_blocks:
            self.kv_blocks.add(now, change)
            replica.used_blocks = used
        if used > replica.peak_blocks:
            replica.peak_blocks = used
        if replica.board is not None:
            replica.board.note(replica)
        if scheduler.admitted:
            self._send(replica, now)

    def _note(self, replica: SimReplica, plan: Any, finished: list[Any], end: float) -> None:
        first = self.first
        if plan.prefills:
            for job in plan.sampled:
                before = first[job.index]
                if before != before:
                    first[job.index] = end
        if finished:
            self.num_finished += len(finished)
            for job in finished:
                self.finished[job.index] = end
                if self.concurrency:
                    self._send_next(end)
            if self.on_progress is not None and self.num_finished % _PROGRESS_EVERY < len(finished):
                self.on_progress(self.num_finished)
        if replica.scheduler.handed:
            self._hand_over(replica, end)

    # ---- from pool to pool

    def _hand_over(self, source: SimReplica, end: float) -> None:
        handed, source.scheduler.handed = source.scheduler.handed, []
        for job in handed:
            self._push(end, _ADOPTION, job, source)

    def _adopt(self, job: Job, source: SimReplica, now: float) -> None:
        target = self.routing.take_over(job, now)
        self.handoffs.open(job, source)
        self.replica[job.index] = target.index
        target.scheduler.adopt(job)
        target.note_load()
        self._stir(target.unit, now)

    def _send(self, replica: SimReplica, now: float) -> None:
        admitted, replica.scheduler.admitted = replica.scheduler.admitted, []
        for job in admitted:
            self._push(self.handoffs.start(job, replica, now), _LANDING, job, replica)

    def _land(self, job: Job, target: SimReplica, now: float) -> None:
        source = self.handoffs.close(job)
        source.scheduler.let_go(job.id)
        target.scheduler.landed(job)
        self.first[job.index] = now  # the user gets the token with the KV, as vLLM and SGLang do it
        for replica in (target, source):
            replica.note_load()
            self._stir(replica.unit, now)

    # ---- what came of it

    def _result(self) -> SimResult:
        replicas = [replica for unit in self.units for replica in unit.replicas]
        return SimResult(
            np.asarray(self.arrival), np.asarray(self.seen), np.asarray(self.begun), np.asarray(self.first),
            np.asarray(self.finished),
            prompt_tokens=np.asarray([request.prompt_tokens for request in self.requests], np.int64),
            output_tokens=np.asarray([request.output_tokens for request in self.requests], np.int64),
            refused=self.refused, waiting=self.waiting, kv_blocks=self.kv_blocks,
            kv_total_blocks=sum(replica.scheduler.pool.num_blocks for replica in replicas),
            kv_peak=max(replica.peak_blocks / replica.scheduler.pool.num_blocks for replica in replicas),
            num_preemptions=sum(replica.scheduler.num_preemptions for replica in replicas),
            num_steps=sum(unit.num_steps for unit in self.units), cached_tokens=self.cached_tokens,
            replica=np.asarray(self.replica, np.int32), frontend_s=np.asarray(self.frontend),
            concurrency=self.concurrency,
        )  # fmt: skip
