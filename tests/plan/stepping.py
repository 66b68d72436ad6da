"""The plainest simulator there is: the engine's own scheduler, router and pool over real token ids, a step at a time.

The product's simulator must give the same schedule; this one shares none of its code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from labkit.engine.blocks import BlockPool
from labkit.engine.lockstep import next_round
from labkit.engine.pools import Pools, ReplicaPool
from labkit.engine.replica import Replica
from labkit.engine.request import Request, RequestRefused, SamplingParams
from labkit.engine.scheduler import Scheduler, SchedulerConfig
from labkit.layout.deployment import pools_of
from labkit.plan.work import EngineSettings, StepWork


class Affine:
    """Seconds of a step, affine in everything that grows. `slowest`: a stage's share of it."""

    def __init__(self, base=0.004, token=3e-5, context=4e-8, pair=2e-9, slowest=1.0, handoff=2e-6):
        self.base, self.token, self.context, self.pair = base, token, context, pair
        self.slowest, self.handoff = slowest, handoff

    def seconds(self, work: StepWork) -> float:
        tokens = work.prefill_tokens + work.decodes
        context = work.prefill_context + work.decode_context
        return self.base + self.token * tokens + self.context * context + self.pair * work.prefill_pairs

    def interval(self, work: StepWork) -> float:
        return self.slowest * self.seconds(work)

    def parts(self, work: StepWork) -> dict[str, float]:
        return {"all": self.seconds(work)}

    def shared_rows(self, rows) -> float:
        return sum(rows) / len(rows)

    def handoff_seconds(self, num_tokens: int) -> float:
        return self.handoff * num_tokens


def work_of(plan) -> StepWork:
    contexts, lens = plan.context_lens, plan.query_lens
    cut = len(plan.prefills)
    pairs = sum(n * c + n * (n + 1) // 2 for n, c in zip(lens[:cut], contexts[:cut], strict=True))
    decode_context = sum(c + 1 for c in contexts[cut:])
    return StepWork(
        sum(lens[:cut]), cut, pairs, pairs, sum(contexts[:cut]), len(lens) - cut, decode_context, decode_context,
        len(plan.sampled),
    )  # fmt: skip


@dataclass
class Told:
    first: dict[int, float] = field(default_factory=dict)
    finished: dict[int, float] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    replica: dict[int, int] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    num_steps: int = 0
    num_preemptions: int = 0
    cached: int = 0


@dataclass
class _Lane:
    """Replicas that step together, and the steps on their way through the stages."""

    replicas: list[Replica]
    cost: Any
    flights: list[tuple[float, list[Any]]] = field(default_factory=list)
    entry: float = 0.0
    last: float = 0.0


class Stepping:
    def __init__(self, requests, layout, cost, kv_blocks, settings: EngineSettings, policy="least-work", concurrency=0):
        self.requests, self.cost, self.concurrency = requests, cost, concurrency
        self.told, self.now = Told(), 0.0
        pools, self.lanes, index = [], [], 0
        for number, part in enumerate(pools_of(layout)):
            replicas = []
            for place, ranks in enumerate(part.replicas):
                config = SchedulerConfig(
                    1 << 40, frozenset(), settings.max_num_batched_tokens, settings.max_num_seqs, settings.policy,
                    part.layout.pp, part.role == "prefill",
                )  # fmt: skip
                pool = BlockPool(kv_blocks, settings.block_size, settings.enable_prefix_caching)
                replica = Replica(index, ranks, ranks[:1], Scheduler(config, pool), pool=number, index_in_pool=place)
                replicas.append(replica)
                index += 1
            pools.append(ReplicaPool(part.role, part.layout, part.ranks, tuple(replicas)))
            groups = [replicas] if part.layout.attention_dp else [[replica] for replica in replicas]
            self.lanes += [_Lane(group, cost) for group in groups]
        self.pools = Pools(pools, policy, 100)
        self.handoffs: dict[str, Replica] = {}
        self.landings: list[tuple[float, int, Request, Replica]] = []
        self.busy: dict[int, float] = {}

    def run(self) -> Told:
        count = len(self.requests)
        due = [(r.arrival_s, i) for i, r in enumerate(self.requests)]
        self.left: list[int] = []
        if self.concurrency:
            due = [(0.0, i) for i in range(min(self.concurrency, count))]
            self.left = list(range(self.concurrency, count))
        self.due = sorted(due)
        while self._advance():
            while self.due and self.due[0][0] <= self.now:
                self._arrive(self.due.pop(0)[1])
            self._land()
            for lane in self.lanes:
                self._plan(lane)
        for lane in self.lanes:
            for replica in lane.replicas:
                replica.scheduler.check_integrity()
        self.told.num_preemptions = sum(r.scheduler.num_preemptions for lane in self.lanes for r in lane.replicas)
        return self.told

    def _advance(self) -> bool:
        """To the next instant; what ends then has ended."""
        instants = [lane.flights[0][0] for lane in self.lanes if lane.flights]
        instants += [at for at, *_ in self.landings] + [at for at, _ in self.due[:1]]
        if not instants:
            return False
        self.now = min(instants)
        for lane in self.lanes:
            while lane.flights and lane.flights[0][0] <= self.now:
                self._end(lane, lane.flights.pop(0)[1])
        return True

    def _arrive(self, index: int) -> None:
        asked = self.requests[index]
        tokens = tuple(_tokens(index, asked))
        request = Request(str(index), tokens, SamplingParams(max_tokens=asked.output_tokens, ignore_eos=True), 0)
        try:
            replica, _ = self.pools.begin(request)
            replica.scheduler.add(request)
        except RequestRefused:
            self.told.refused.add(index)
            return
        self.told.replica[index] = replica.index

    def _plan(self, lane: _Lane) -> None:
        while True:
            if len(lane.replicas) > 1:
                plans = next_round(lane.replicas)
            else:
                plan = lane.replicas[0].scheduler.schedule()
                plans = [] if plan is None else [plan]
            self._send(lane)
            if not plans:
                return
            self.told.num_steps += 1
            works = [work_of(plan) for plan in plans if plan]
            seconds = max(lane.cost.seconds(work) for work in works)
            interval = max(lane.cost.interval(work) for work in works)
            for replica in lane.replicas:
                replica.num_in_flight += 1
            start = max(self.now, lane.entry)
            lane.entry = start + interval
            stages = lane.replicas[0].scheduler.config.max_in_flight
            lane.last = max(start + seconds, lane.last + interval) if stages > 1 else start + seconds
            lane.flights.append((lane.last, plans))
            if stages == 1:
                return

    def _end(self, lane: _Lane, plans: list[Any]) -> None:
        for replica, plan in zip(lane.replicas, plans, strict=True):
            replica.num_in_flight -= 1
            if not plan and not replica.scheduler.num_in_flight:
                continue
            if not plan:
                continue
            tokens = [10**9 + i for i in range(len(plan.sampled))]
            finished = replica.scheduler.complete(plan, tokens)
            for request in plan.sampled:
                request.output[-1] = -1 - int(request.id) * 10**6 - len(request.output)
                self.told.first.setdefault(int(request.id), self.now)
            for request in finished:
                index = int(request.id)
                self.told.finished[index] = self.now
                self.told.order.append(index)
                if self.left:
                    self.due.append((self.now, self.left.pop(0)))
            handed, replica.scheduler.handed = replica.scheduler.handed, []
            for request in handed:
                target, _ = self.pools.take_over(request)
                self.handoffs[request.id] = replica
                self.told.replica[int(request.id)] = target.index
                target.scheduler.adopt(request)

    def _send(self, lane: _Lane) -> None:
        for target in lane.replicas:
            admitted, target.scheduler.admitted = target.scheduler.admitted, []
            for request in admitted:
                source = self.handoffs[request.id]
                begin = max(self.now, self.busy.get(source.index, 0.0), self.busy.get(target.index, 0.0))
                end = begin + self.cost.handoff_seconds(request.arriving - request.num_computed)
                self.busy[source.index] = self.busy[target.index] = end
                self.landings.append((end, int(request.id), request, target))
                self.landings.sort(key=lambda each: each[0])

    def _land(self) -> None:
        while self.landings and self.landings[0][0] <= self.now:
            _, index, request, target = self.landings.pop(0)
            self.handoffs.pop(request.id).scheduler.let_go(request.id)
            target.scheduler.landed(request)
            self.told.first[index] = self.now


def _tokens(index: int, asked) -> list[int]:
    shared = [block * 10**6 + i for block in asked.block_ids for i in range(asked.block_tokens)]
    own = [-(10**12) - index * 10**6 - i for i in range(asked.prompt_tokens)]
    return (shared + own)[: asked.prompt_tokens] if shared else own
