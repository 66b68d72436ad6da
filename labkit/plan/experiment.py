"""How a load is simulated, alike for `labkit simulate` and for the look that a plan takes: so many requests, an engine
that goes about it as it is set, a front end before it, and which of the requests count.

Of a closed loop it is the loop as it goes on: its clients start in the midst of an answer each, anywhere in it, since
ones that start together with equal answers would go on together for ever, which measured servers do not show. These
first requests do not count, nor the last ones, behind whom nobody follows. Of an open loop the first fifth came while
the server filled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from labkit.layout import AnyLayout, pools_of
from labkit.model.shapes import ModelSpec
from labkit.plan.cost import step_cost
from labkit.plan.engine_cost import engine_constants
from labkit.plan.hardware import Hardware
from labkit.plan.memory import MemoryPlan, memory_on
from labkit.plan.sim.request import SimRequest
from labkit.plan.sim.result import SimResult, first_ones
from labkit.plan.simulate import Options, simulate
from labkit.plan.work import EngineSettings, StepCost

LEAST, EACH_REPLICA, ROUNDS = 300, 100, 5
"""Requests: at least, of each replica, and of each client of a closed loop."""
FRONT_END_SPREAD = 0.5
"""Of a request's mean time in the front end: how much more or less it takes, evenly spread. Assumed: no measured row
tells it, and without any spread requests that came into one step would stay together."""


def num_requests(layout: AnyLayout, concurrency: int) -> int:
    """As many as a simulation needs to say something of the percentiles."""
    replicas = sum(pool.layout.dp for pool in pools_of(layout))
    return max(LEAST, EACH_REPLICA * replicas, ROUNDS * concurrency)


def served(
    requests: Sequence[SimRequest], layout: AnyLayout, spec: ModelSpec, hardware: Hardware, settings: EngineSettings,
    engine: str = "vllm", *, concurrency: int = 0, kv_blocks: int = 0, routing: str = "least-work",
    ahead: bool | None = None, seed: int = 0, on_progress: Callable[[int], None] | None = None,
) -> SimResult:  # fmt: skip
    """`requests` on this layout. kv_blocks: of a replica, where not the memory decides. ahead: None: as the engine does
    it (vLLM plans ahead, except with pipeline stages here). seed: of what the front end takes, and of where in its
    first answer each client of a closed loop is."""
    rng = np.random.default_rng(seed)
    requests = _in_the_midst(requests, first_ones(len(requests), concurrency), rng)
    ahead = settings.policy == "vllm" if ahead is None else ahead
    return simulate(
        requests, layout, costs(layout, spec, hardware, settings, engine),
        kv_blocks or usable_blocks(memory_on(layout, spec, hardware, settings)), settings, concurrency=concurrency,
        options=Options(routing=routing, ahead=ahead, window=spec.sliding_window or 0), on_progress=on_progress,
        frontend_s=front_end_s(requests, engine, spec, rng),
    )  # fmt: skip


def _in_the_midst(requests: Sequence[SimRequest], number: int, rng: np.random.Generator) -> list[SimRequest]:
    """The first ones' answers cut to what is left of them at an instant that knows nothing of them."""
    left = rng.random(number)
    begun = [
        replace(request, output_tokens=max(1, math.ceil(request.output_tokens * share)))
        for request, share in zip(requests, left, strict=False)
    ]
    return [*begun, *requests[number:]]


def front_end_s(
    requests: Sequence[SimRequest], engine: str, spec: ModelSpec, rng: np.random.Generator
) -> list[float]:
    """Seconds of each request in HTTP and the tokenizer, as the engine's measured rows have them."""
    constants = engine_constants(engine, spec)
    tokens = np.array([request.prompt_tokens for request in requests])
    mean = constants.request_s + constants.request_token_s * tokens
    spread = rng.uniform(1 - FRONT_END_SPREAD, 1 + FRONT_END_SPREAD, len(requests))
    found: list[float] = (mean * spread).tolist()
    return found


def costs(
    layout: AnyLayout, spec: ModelSpec, hardware: Hardware, settings: EngineSettings, engine: str = "vllm"
) -> StepCost | dict[str, StepCost]:
    """A step's cost; by role where there are pools."""
    found = {pool.role: step_cost(pool.layout, spec, hardware, settings, engine) for pool in pools_of(layout)}
    return found if len(found) > 1 else next(iter(found.values()))


def usable_blocks(memory: MemoryPlan) -> dict[str, int] | int:
    """Blocks of `block_size` tokens that requests get, of a replica of each role. vLLM keeps one block empty."""
    kept = 1 if memory.settings.policy == "vllm" else 0
    found = {plan.pool.role: (plan.kv_blocks - kept) // max(1, plan.groups.full) for plan in memory.pools}
    return found if len(found) > 1 else next(iter(found.values()))
