"""A scheduler and its one rank, which computes with integers, stepped by hand."""

from __future__ import annotations

import random

from arithmetic_ranks import Pages, answer_to

from labkit.engine.blocks import BlockPool
from labkit.engine.plan import StepPlan
from labkit.engine.request import FinishReason, Request, SamplingParams
from labkit.engine.scheduler import Scheduler, SchedulerConfig


class Bench:
    """A scheduler and its one rank, stepped by hand; integrity is checked around every step."""

    def __init__(self, num_blocks: int = 64, block_size: int = 4, prefix_cache: bool = True, **config) -> None:
        config = {"max_context": 1000, "max_num_batched_tokens": 32, "max_num_seqs": 8, **config}
        self.pool = BlockPool(num_blocks, block_size, prefix_cache)
        self.scheduler = Scheduler(SchedulerConfig(**config), self.pool)
        self.pages = Pages(num_blocks, block_size)
        self.num_steps = 0

    def add(self, name: str, prompt: list[int] | int, max_tokens: int = 4, **params) -> Request:
        tokens = tuple(prompt if isinstance(prompt, list) else numbers(name, prompt))
        request = Request(name, tokens, SamplingParams(max_tokens=max_tokens, **params), received_ns=0)
        self.scheduler.add(request)
        return request

    def send(self) -> tuple[StepPlan, list[int]] | None:
        """The next plan, run by the rank; its answer is not given to the scheduler yet."""
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan is None:
            return None
        self.num_steps += 1
        return plan, self.pages.run(plan.to_message(0, self.num_steps))

    def step(self) -> StepPlan | None:
        sent = self.send()
        if sent is None:
            return None
        self.scheduler.complete(*sent)
        self.scheduler.check_integrity()
        return sent[0]

    def run(self) -> int:
        num_steps = 0
        while self.step() is not None:
            num_steps += 1
            assert num_steps < 10_000, "the scheduler goes round in circles"
        assert not self.scheduler.requests
        assert self.pool.num_free == self.pool.num_blocks
        assert self.scheduler.load_tokens == 0
        return num_steps


def numbers(seed: str, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(900) for _ in range(count)]


def assert_answered(*requests: Request) -> None:
    for request in requests:
        assert request.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        assert request.output == answer_to(request.prompt, request.params.max_tokens, request.stop_ids)
