"""Prefill apart from decode: what a deployment of two pools predicts, and whether moving the KV is worth it.

The prefill pool answers one token a request, the decode pool takes no prompts, so its steps are decodes alone; between
them stands the handoff. A closed loop is the rate at which as many are in flight as are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from labkit.layout import Deployment, Layout
from labkit.layout.legality import is_legal
from labkit.plan.candidates import Candidate, judged
from labkit.plan.case import Case, computed_prompt, cost_of_step, decode_work
from labkit.plan.memory import MemoryPlan, memory_on
from labkit.plan.objective import spoken_ms
from labkit.plan.predict import Prediction, predict_open
from labkit.said import say

if TYPE_CHECKING:
    from labkit.plan.checks import Check

POOL_TP = (1, 2, 4, 8)
BUSY = {"mean": 0.0, "p50": 0.0, "p95": 1.645, "p99": 2.326}
"""Standard deviations of the number in flight (Poisson, so its root) above the mean at each percentile."""
ROUNDS = 30


@dataclass(frozen=True)
class PoolFigures:
    rate: float
    in_flight: float
    """Answers in the decode pool."""
    handoff_s: float
    link_use: float
    """Of the time, how long the handoff's link is in use."""
    prefill_use: float


def pool_candidates(case: Case, fewer_than: int) -> list[Candidate]:
    """Prefill and decode by tensor parallelism, replicated as far as the GPUs go, smallest first."""
    from labkit.plan.candidates import engine_reason

    layouts = [Layout(dp=dp, tp=tp) for tp in POOL_TP for dp in range(1, fewer_than + 1) if dp * tp <= fewer_than]
    legal = [one for one in layouts if is_legal(one, case.spec) and not engine_reason(case.engine, one)]
    pairs = [(a, b) for a in legal for b in legal if a.world_size + b.world_size <= fewer_than]
    found = [pool_candidate(case, Deployment.of(("prefill", a), ("decode", b))) for a, b in pairs]
    return sorted(found, key=lambda one: one.num_gpus)


def pool_candidate(case: Case, deployment: Deployment) -> Candidate:
    prefill, decode = (pool.layout for pool in deployment.pools)
    plans = [memory_on(one, case.spec, case.hardware, case.settings) for one in (prefill, decode)]
    lacking = next((plan for plan in plans if not plan.fits), None)
    if lacking is not None:
        return Candidate(deployment, case.settings, True, False, False, lacking.reason, "memory", lacking)
    longest, least = case.demand.longest_tokens, min(plans, key=lambda plan: plan.kv_tokens)
    if least.kv_tokens < longest:
        reason = say(
            "{layout}: the longest request has {tokens:,} tokens, and a replica of {pool} holds KV for {held:,}.",
            layout=deployment, tokens=longest, pool=least.layout, held=least.kv_tokens,
        )  # fmt: skip
        return Candidate(deployment, case.settings, True, False, True, reason, "memory", least)
    found, _ = predict_pools(case, prefill, decode, plans[1])
    return judged(case, deployment, case.settings, plans[1], found)


def predict_pools(case: Case, prefill: Layout, decode: Layout, held: MemoryPlan) -> tuple[Prediction, PoolFigures]:
    """`held`: the decode pool's memory."""
    if case.demand.rate is not None:
        return _at_rate(case, prefill, decode, held, case.demand.rate)
    assert case.demand.concurrency is not None
    low, high = 0.0, _prefill_most(case, prefill)
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        found, _ = _at_rate(case, prefill, decode, held, middle)
        below = math.isfinite(found.concurrency) and found.concurrency <= case.demand.concurrency
        low, high = (middle, high) if below else (low, middle)
    found, figures = _at_rate(case, prefill, decode, held, max(low, 1e-6))
    return _with_queue(found, case.demand.concurrency, figures.in_flight > 0.95 * _seats(case, decode, held)), figures


def _with_queue(found: Prediction, asked: int, seated: bool) -> Prediction:
    """Those in flight beyond what the pools carry wait in front of them (Little: in flight = rate · stay)."""
    if not math.isfinite(found.concurrency):
        return found
    waiting_ms = 1e3 * (asked - found.concurrency) / found.requests_per_s
    if not waiting_ms > 0.01 * found.ttft_ms["mean"]:  # what is left of the search
        return found
    ttft = {name: value + waiting_ms for name, value in found.ttft_ms.items()}
    return replace(
        found, ttft_ms=ttft, queue_ms=found.queue_ms + waiting_ms, concurrency=float(asked), kv_full=seated
    )


def _seats(case: Case, decode: Layout, held: MemoryPlan) -> int:
    """Answers that the decode pool writes at once, by its KV and by max_num_seqs."""
    return min(held.most_requests(case.demand.tokens_each), case.settings.max_num_seqs * decode.dp * decode.pp)


def _prefill_most(case: Case, prefill: Layout) -> float:
    """Requests a second that the prefill pool computes at most."""
    from labkit.plan.case import prefill_seconds

    prompt = computed_prompt(case.demand, case.settings)
    return prefill.dp / prefill_seconds(cost_of_step(case, prefill), prompt, case.settings)


def _at_rate(
    case: Case, prefill: Layout, decode: Layout, held: MemoryPlan, rate: float
) -> tuple[Prediction, PoolFigures]:
    demand, prompt = case.demand, computed_prompt(case.demand, case.settings)
    first = predict_open(prefill, case.spec, case.hardware, case.settings, prompt_tokens=prompt, output_tokens=1,
                         rate=rate, engine=case.engine)  # fmt: skip
    handoff_s = cost_of_step(case, prefill).handoff_seconds(demand.prompt_tokens)
    link_use = rate * handoff_s / prefill.dp
    prefill_most = _prefill_most(case, prefill)
    served = min(rate, prefill_most, prefill.dp / handoff_s if handoff_s else math.inf)
    seats = _seats(case, decode, held)
    in_flight = _in_flight(case, decode, served, seats)
    full = not math.isfinite(in_flight)
    if full:
        served = min(served, 1e3 * seats / demand.output_tokens / _step_ms(case, decode, seats))
    tpot = {name: _step_ms(case, decode, in_flight + z * math.sqrt(in_flight)) if not full else
            _step_ms(case, decode, seats) for name, z in BUSY.items()}  # fmt: skip
    late = math.inf if full or served < rate else 1e3 * handoff_s
    ttft = {name: value + late for name, value in first.ttft_ms.items()}
    stay_s = (ttft["mean"] + demand.output_tokens * tpot["mean"]) / 1e3
    found = replace(
        first, ttft_ms=ttft, tpot_ms=tpot, requests_per_s=served, tokens_per_s=served * demand.output_tokens,
        concurrency=rate * stay_s, kv_full=full,
        source=say("{source}; decode pool by its steps alone", source=first.source),
    )  # fmt: skip
    return found, PoolFigures(rate, in_flight, handoff_s, link_use, rate / prefill_most)


def _in_flight(case: Case, decode: Layout, rate: float, seats: int) -> float:
    """Answers being written when as many come as go: n = rate · answer · step(n). Infinite beyond the seats."""
    low, high = 0.0, float(seats)
    if high < 1 or rate * case.demand.output_tokens * _step_ms(case, decode, high) / 1e3 > high:
        return math.inf
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        asks = rate * case.demand.output_tokens * _step_ms(case, decode, middle) / 1e3
        low, high = (middle, high) if asks > middle else (low, middle)
    return high


def _step_ms(case: Case, decode: Layout, in_flight: float) -> float:
    seqs = max(1, math.ceil(in_flight / decode.dp / decode.pp))
    context = case.demand.prompt_tokens + case.demand.output_tokens // 2
    return 1e3 * cost_of_step(case, decode).seconds(decode_work(seqs, context))


def pool_checks(case: Case, candidate: Candidate) -> Iterator[Check]:
    from labkit.plan.checks import FAILED, NOT_MEASURED, PASSED, Check

    assert isinstance(candidate.layout, Deployment) and candidate.memory is not None
    prefill, decode = (pool.layout for pool in candidate.layout.pools)
    _, figures = predict_pools(case, prefill, decode, candidate.memory)
    yield Check("pd", say("transfer"), PASSED if figures.link_use < 1 else FAILED,
                say("{time} to move the KV of {tokens:,} tokens; the link is in use {share:.0%} of the time.",
                    time=spoken_ms(1e3 * figures.handoff_s), tokens=case.demand.prompt_tokens, share=figures.link_use),
                {"handoff_s": figures.handoff_s, "link_use": figures.link_use})  # fmt: skip
    yield Check("pd", say("pools"), PASSED if figures.prefill_use < 1 else FAILED,
                say("The prefill pool is busy {share:.0%} of the time; {n:.0f} answers are in the decode pool, which "
                    "holds {most}.", share=figures.prefill_use, n=figures.in_flight, most=candidate.most_requests),
                {"prefill_use": figures.prefill_use, "in_flight": figures.in_flight})  # fmt: skip
    yield Check("pd", say("handoff measured"), NOT_MEASURED,
                say("How fast this network really moves KV was not measured."), {},
                say("labkit run --layout {layout}: its summary has the handoff's MiB/s",
                    layout=candidate.layout.slug))  # fmt: skip
