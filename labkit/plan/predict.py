"""What a user would see: TTFT and TPOT of a layout in a closed loop or at a rate, in closed form, with their error.

Below the point where the KV cache is full both come from `labkit.plan.closed_loop`. Beyond it the replica holds as many
requests as fit and the others wait: TTFT grows by (requests ÷ requests that fit − 1) lives, TPOT stays. The bands are
mean absolute errors, measured by leaving the model out (docs/predictions.md); wider for what was never measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from labkit.layout import Layout
from labkit.model.shapes import ModelSpec
from labkit.plan.closed_loop import Loop, closed_loop
from labkit.plan.cost import RooflineCost, step_cost
from labkit.plan.engine_cost import engine_constants, error_bands
from labkit.plan.hardware import Hardware
from labkit.plan.work import EngineSettings, StepCost
from labkit.said import say

PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_NO_WINDOW = 1e9
RESERVED_OUTPUT = {"vllm": 0.5, "sglang": 0.75, "trtllm": 1.0, "labkit": 1.0}
"""How much of the output a running request holds in the cache, on average: vLLM admits by what is there (half of it),
TensorRT-LLM's default reserves all, SGLang reserves a share that it adapts (it begins at 0.7)."""
_NORMAL = {"p50": 0.0, "p95": 1.645, "p99": 2.326}


@dataclass(frozen=True)
class Prediction:
    """Milliseconds; `band_*` are relative mean absolute errors (0.18: ± 18 %)."""

    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    requests_per_s: float
    tokens_per_s: float
    """Output tokens."""
    concurrency: float
    """Requests in flight, of the whole deployment."""
    kv_full: bool
    queue_ms: float
    """Of the mean TTFT: waiting for others' prompts or for KV. Infinite where the rate is above what can be served."""
    source: str
    band_ttft: float
    band_tpot: float


def _source(cost: StepCost | None, engine: str) -> str:
    """Which cost model speaks."""
    fitted = cost is None or isinstance(cost, RooflineCost)
    return say("roofline and collectives, fitted for {engine}", engine=engine) if fitted else say("the step cost given")


def _capacity(
    layout: Layout, spec: ModelSpec, hardware: Hardware, settings: EngineSettings, engine: str, prompt: float,
    output: float,
) -> float:  # fmt: skip
    """Requests that one replica holds at once. Raises ValueError with the reason when the model does not fit."""
    from labkit.plan.memory import memory_on

    plan = memory_on(layout, spec, hardware, settings)
    if not plan.fits:
        raise ValueError(plan.reason)
    held = RESERVED_OUTPUT[engine] if settings.policy == "vllm" else 1.0
    fits = plan.most_requests(math.ceil(prompt + held * output)) / layout.dp
    if fits < 1:
        raise ValueError(plan.verdict(1, math.ceil(prompt + output)).reason)
    return min(float(settings.max_num_seqs), fits)


def _loop(
    cost: StepCost, layout: Layout, spec: ModelSpec, settings: EngineSettings, engine: str, prompt: float,
    output: float, requests: float, rounds: int, version: str, wait_steps: float = 0.0,
    exact_lengths: bool = False, at_random: bool = False,
) -> Loop:  # fmt: skip
    constants = engine_constants(engine, spec, version)
    return closed_loop(
        cost.seconds, prompt=prompt, output=max(2.0, output), requests=max(1.0, requests),
        budget=settings.max_num_batched_tokens, window=spec.sliding_window or _NO_WINDOW,
        request_s=constants.request_s + constants.request_token_s * prompt, queue_share=constants.queue_share,
        mixed=0.0 if engine == "sglang" else 1.0, burst_share=1 / rounds if rounds else 0.0,
        wait_steps=wait_steps, clump_share=constants.clump_share if exact_lengths else 0.0,
        interval=cost.interval if layout.pp > 1 else None, stages=layout.pp, at_random=at_random,
    )  # fmt: skip


def predict_closed(
    layout: Layout, spec: ModelSpec, hardware: Hardware, settings: EngineSettings, *, prompt_tokens: float,
    output_tokens: float, concurrency: float, engine: str = "vllm", rounds: int = 0, cost: StepCost | None = None,
    version: str = "", wait_steps: float = 0.0, exact_lengths: bool = False,
) -> Prediction:  # fmt: skip
    """A closed loop of `concurrency` requests over all replicas. `rounds`: requests a client sends after starting with
    all others at once, as benchmarks do; 0: the steady state. `cost`: instead of the fitted one. `version`: of the
    engine, where its rows were measured. `exact_lengths`: all answers are equally long.

    Raises ValueError when the model does not fit, LayoutError when it does not allow the layout.
    """
    source = _source(cost, engine)
    cost = cost or step_cost(layout, spec, hardware, settings, engine, version=version)
    room = _capacity(layout, spec, hardware, settings, engine, prompt_tokens, output_tokens)
    each = concurrency / layout.dp
    held = min(each, room)
    loop = _loop(
        cost, layout, spec, settings, engine, prompt_tokens, output_tokens, held, rounds, version, wait_steps,
        exact_lengths,
    )  # fmt: skip
    life = loop.ttft_s + (output_tokens - 1) * loop.tpot_s
    waiting = max(0.0, each / held - 1) * life
    rate = layout.dp * held / life
    return _prediction(
        loop, waiting, rate, output_tokens, concurrency, each > room, source, spec, hardware, engine,
        burst_share=1 / rounds if rounds else 0.0, turns=each - held,
    )  # fmt: skip


def predict_open(
    layout: Layout, spec: ModelSpec, hardware: Hardware, settings: EngineSettings, *, prompt_tokens: float,
    output_tokens: float, rate: float, engine: str = "vllm", cost: StepCost | None = None, version: str = "",
) -> Prediction:  # fmt: skip
    """Poisson arrivals at `rate` a second over all replicas: the closed loop whose throughput is the rate, and the
    queue of an M/D/1 prefill server in front. Where more arrives than is served, TTFT and queue are infinite."""
    source = _source(cost, engine)
    cost = cost or step_cost(layout, spec, hardware, settings, engine, version=version)
    room = _capacity(layout, spec, hardware, settings, engine, prompt_tokens, output_tokens)
    own = rate / layout.dp
    low, high = 0.0, room

    def loop_at(requests: float) -> tuple[Loop, float]:
        loop = _loop(
            cost, layout, spec, settings, engine, prompt_tokens, output_tokens, requests, 0, version, at_random=True
        )
        return loop, max(requests, 1e-9) / (loop.ttft_s + (output_tokens - 1) * loop.tpot_s)

    loop, most = loop_at(room)
    full = own >= most
    if not full:
        for _ in range(18):
            middle = (low + high) / 2
            loop, served = loop_at(middle)
            low, high = (middle, high) if served < own else (low, middle)
    busy = min(0.99, own * loop.prefill_s)
    waiting = math.inf if full else busy * loop.prefill_s / (2 * (1 - busy))
    extra = max(0.0, waiting - loop.queue_s)
    return _prediction(
        loop, extra, min(own, most) * layout.dp, output_tokens, (low + high) / 2 * layout.dp, full, source, spec,
        hardware, engine, at_random=min(own, most),
    )  # fmt: skip


def _prediction(
    loop: Loop, waiting: float, rate: float, output: float, concurrency: float, full: bool, source: str,
    spec: ModelSpec, hardware: Hardware, engine: str, *, burst_share: float = 0.0, at_random: float = 0.0,
    turns: float = 0.0,
) -> Prediction:  # fmt: skip
    """`at_random`: prompts a second that come to a replica of themselves; 0: in a closed loop. `turns`: how many
    requests of a closed loop are ahead of one that waits for KV."""
    mean = loop.ttft_s + waiting
    queue = loop.queue_s + (0.0 if turns else waiting)
    ttft, tpot = {"mean": 1e3 * mean}, {"mean": 1e3 * loop.tpot_s}
    interrupted = _interrupted_s(loop, at_random, output)
    for name, share in PERCENTILES.items():
        if math.isinf(queue):
            ttft[name] = math.inf
        elif share < 1 - burst_share:
            turn = _NORMAL[name] * waiting / math.sqrt(turns) if turns else 0.0  # a wait of so many others' ends
            late = (share - 0.5) * loop.step_s  # an arrival falls anywhere into a step
            ttft[name] = 1e3 * (mean - queue + _queue_at(share / (1 - burst_share), queue, loop.own_s) + turn + late)
        else:
            ttft[name] = 1e3 * (waiting + 2 * loop.burst_s * (share - 1 + burst_share) / burst_share)
        tpot[name] = 1e3 * (loop.tpot_s + _NORMAL[name] * interrupted / max(1.0, output - 1))
    bands = error_bands(spec, hardware.device.name, engine)
    return Prediction(
        ttft, tpot, rate, rate * output, concurrency, full, 1e3 * (loop.queue_s + waiting), source, bands[0], bands[1]
    )


def _interrupted_s(loop: Loop, at_random: float, output: float) -> float:
    """Standard deviation of what others' prompts add to one answer. Of prompts that come at random as many meet it as
    come in its life, Poisson, and it lives the longer for each; in a closed loop their number is nearly fixed."""
    if not at_random:
        return 0.5 * math.sqrt(max(0.0, loop.decoding - 1)) * loop.prefill_s
    met = at_random * (loop.ttft_s + (output - 1) * loop.tpot_s)
    return math.sqrt(met) * loop.prefill_s / (1 - min(0.95, at_random * loop.prefill_s))


def _queue_at(share: float, queue: float, own: float) -> float:
    """A percentile of the wait for others' prompts, whose mean is `queue`: its length is nearly memoryless; where it is
    short, who finds another's prompt at work (mean ÷ (own + mean) of all, by the queue's equation) waits for anything
    up to the whole of it."""
    rest = max(1e-9, 1 - share)
    found = queue / (own + queue) if own + queue > 0 else 0.0
    return max(-queue * math.log(rest), own * (1 - rest / found) if found > rest else 0.0)
