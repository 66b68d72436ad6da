"""Steps of replicas and stages that share cores, one by one: the engine's own schedulers on a virtual clock.

A step under way slows down when another replica or stage begins to work beside it, and speeds up when that is over; so
each has a share left and a rate, and the clock goes from one change to the next. For checking what a simulation with
an average company leaves out; `labkit.plan.simulate` is the fast one.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from labkit.engine.blocks import BlockPool
from labkit.engine.plan import StepPlan
from labkit.engine.request import Request, SamplingParams
from labkit.engine.router import Router
from labkit.engine.scheduler import Scheduler, SchedulerConfig
from labkit.layout import Layout
from labkit.model.counts import visible_pairs
from labkit.plan.fitted_cost import FittedCost, features
from labkit.plan.work import StepWork


@dataclass(eq=False)
class Step:
    replica: int
    plan: StepPlan
    times: list[tuple[float, float]]
    """By stage: seconds alone, and what full company adds."""
    stage: int = 0
    left: float = 1.0


@dataclass(eq=False)
class Place:
    """One stage of one replica: its queue of steps, the first of them at work."""

    queue: deque[Step] = field(default_factory=deque)

    def seconds(self, share: float) -> float:
        alone, company = self.queue[0].times[self.queue[0].stage]
        return alone + share * company


def work_of(plan: StepPlan) -> StepWork:
    contexts = [request.num_computed for request in plan.decodes]  # the new token counted
    pairs = sum(visible_pairs(chunk, end - chunk, None) for chunk, end in zip(plan.chunks, plan.ends, strict=True))
    return StepWork(
        plan.prefill_tokens, plan.num_prefill_seqs, pairs, pairs, sum(plan.ends) - plan.prefill_tokens,
        plan.num_decode_seqs, sum(contexts), sum(contexts), len(plan.sampled),
    )  # fmt: skip


class SharedLoop:
    """arrivals: (seconds, prompt tokens, output tokens), in order of time. `run` gives (ttft_s, tpot_s) by request."""

    def __init__(self, layout: Layout, cost: FittedCost, kv_blocks: int, max_context: int = 8192,
                 tokens: int = 512, seqs: int = 64, block_size: int = 16) -> None:  # fmt: skip
        config = SchedulerConfig(
            max_context, max_num_batched_tokens=tokens, max_num_seqs=seqs, max_in_flight=layout.pp
        )
        self.schedulers = [Scheduler(config, BlockPool(kv_blocks, block_size, False)) for _ in range(layout.dp)]
        self.places = [[Place() for _ in range(layout.pp)] for _ in range(layout.dp)]
        self.all = [place for places in self.places for place in places]
        self.cost, self.router, self.now = cost, Router(), 0.0
        self.busy_s = 0.0
        """Of all places together."""
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self._back: list[tuple[float, int, Step]] = []
        self._count = itertools.count()

    def run(self, arrivals: Sequence[tuple[float, int, int]]) -> tuple[np.ndarray, np.ndarray]:
        coming = deque(enumerate(arrivals))
        while coming or self._back or any(place.queue for place in self.all):
            rates = self._rates()
            ends = [(self.now + place.queue[0].left / rate, at) for at, (place, rate) in rates.items()]
            times = [min(ends)[0]] if ends else []
            times += [coming[0][1][0]] if coming else []
            times += [self._back[0][0]] if self._back else []
            self._advance(max(self.now, min(times)), rates)
            while coming and coming[0][1][0] <= self.now:
                self._arrive(*coming.popleft())
        ttft = np.array([self.first[str(i)] - at for i, (at, _, _) in enumerate(arrivals)])
        counts = np.array([max(1, n - 1) for _, _, n in arrivals])
        tpot = np.array([self.last[str(i)] - self.first[str(i)] for i in range(len(arrivals))]) / counts
        return ttft, tpot

    def _rates(self) -> dict[int, tuple[Place, float]]:
        busy = [at for at, place in enumerate(self.all) if place.queue]
        share = (len(busy) - 1) / max(1, len(self.all) - 1)
        return {at: (self.all[at], 1 / max(1e-9, self.all[at].seconds(share))) for at in busy}

    def _advance(self, until: float, rates: dict[int, tuple[Place, float]]) -> None:
        passed, self.now = until - self.now, until
        self.busy_s += passed * len(rates)
        over = []
        for place, rate in rates.values():
            place.queue[0].left -= passed * rate
            if place.queue[0].left <= 1e-9:
                over.append(place.queue.popleft())
        for step in over:
            self._stage_over(step)
        while self._back and self._back[0][0] <= self.now:
            self._complete(heapq.heappop(self._back)[2])

    def _stage_over(self, step: Step) -> None:
        step.stage, step.left = step.stage + 1, 1.0
        if step.stage < len(step.times):
            self.places[step.replica][step.stage].queue.append(step)
        else:
            heapq.heappush(self._back, (self.now + max(0.0, self.cost.hops_s), next(self._count), step))

    def _complete(self, step: Step) -> None:
        for request in step.plan.sampled:
            self.first.setdefault(request.id, self.now)
            self.last[request.id] = self.now
        self.schedulers[step.replica].complete(step.plan, [1] * len(step.plan.sampled))
        self._plan(step.replica)

    def _arrive(self, index: int, asked: tuple[float, int, int]) -> None:
        _, prompt, output = asked
        request = Request(str(index), tuple(range(prompt)), SamplingParams(output, ignore_eos=True), 0)
        chosen, _ = self.router.choose(prompt, [scheduler.view() for scheduler in self.schedulers])
        self.schedulers[chosen].add(request)
        self._plan(chosen)

    def _plan(self, replica: int) -> None:
        while (plan := self.schedulers[replica].schedule()) is not None:
            amounts = features(work_of(plan))
            times = [
                (self.cost.turnaround_s + stage.seconds(amounts),
                 sum(c * a for c, a in zip(stage.company, amounts, strict=True)))
                for stage in self.cost.stages
            ]  # fmt: skip
            self.places[replica][0].queue.append(Step(replica, plan, times))
