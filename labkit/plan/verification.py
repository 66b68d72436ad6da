"""The simulator's look at what the closed form chose: the engine's own scheduler on a virtual clock, real lengths.

The closed form takes every request as the mean one; a few hundred requests with their own lengths and arrivals show
what that hides (a long prompt among short ones, a burst, KV that fills for a moment). What it refuses is not chosen.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from labkit.layout import Deployment, pools_of
from labkit.plan.candidates import Candidate
from labkit.plan.case import Case, cost_of_step
from labkit.plan.chips import chip_of
from labkit.plan.memory import memory_plan
from labkit.plan.objective import judge
from labkit.plan.simulate import SimRequest, SimResult, simulate
from labkit.said import say, with_semicolons

LEAST, EACH_REPLICA, MOST, ROUNDS_OF_CLOSED = 300, 100, 1200, 3
"""Requests: at least, of each replica, in all, and for each one in flight of a closed loop."""
SETTLING = 0.2
"""Of the requests, the first: the server was empty before them."""
NOISE = 0.05
"""Of a limit: what p95 of a few hundred requests is known to; what misses by less is not refused."""


def verified(case: Case, candidate: Candidate) -> Candidate:
    """The candidate with what a simulation of it says: {does, ttft_ms, tpot_ms, outcomes, sentence, …}."""
    result = simulated(case, candidate)
    percentiles = steady_percentiles(result)
    tokens = float(result.output_tokens[result.done].sum()) / max(result.span_s, 1e-9)
    band = candidate.prediction.band_tpot if candidate.prediction else 0.0
    outcomes = judge(case.objective, percentiles["ttft_ms"], percentiles["tpot_ms"], tokens, band_ttft=band,
                     band_tpot=band)  # fmt: skip
    if case.demand.rate is not None:  # as many tokens as were asked for: the drain at the end is not the server's
        outcomes = [outcome for outcome in outcomes if outcome.metric != "server_tokens"]
    missed = [outcome for outcome in outcomes if outcome.ratio > 1 + NOISE]
    told = say("Simulated with {n} requests: {outcomes}; KV at most {kv:.0%} in use, {preempted} preemptions.",
               n=len(result.done), outcomes=with_semicolons(outcome.sentence for outcome in outcomes),
               kv=result.kv_peak, preempted=result.num_preemptions)  # fmt: skip
    return replace(candidate, verified={
        "does": not missed, "metric": missed[0].metric if missed else "",
        "ratio": max((outcome.ratio for outcome in outcomes), default=0.0), **percentiles, "requests": len(result.done),
        "kv_peak": result.kv_peak, "preemptions": result.num_preemptions, "refused": len(result.refused),
        "outcomes": [outcome.to_dict() for outcome in outcomes],
        "sentence": told,
    })  # fmt: skip


def refused_by(candidate: Candidate) -> tuple[str, str] | None:
    """(fault, reason) where the simulation says no."""
    found = candidate.verified
    if found is None or found["does"]:
        return None
    return str(found["metric"]), say("{layout}: {found}", layout=candidate.layout, found=found["sentence"])


def simulated(case: Case, candidate: Candidate) -> SimResult:
    """Of this candidate, with its settings."""
    layout, settings = candidate.layout, candidate.settings
    device, chip = case.hardware.device, chip_of(case.hardware.device.name)
    costs = {pool.role: cost_of_step(case, pool.layout, settings) for pool in pools_of(layout)}
    blocks = {
        pool.role: memory_plan(pool.layout, case.spec, device.memory_bytes, settings, chip=chip).kv_blocks
        for pool in pools_of(layout)
    }
    one = next(iter(costs)) if not isinstance(layout, Deployment) else None
    return simulate(
        requests_of(case, sum(pool.layout.dp for pool in pools_of(layout))), layout, costs[one] if one else costs,
        blocks[one] if one else blocks, settings, concurrency=case.demand.concurrency or 0,
    )  # fmt: skip


def requests_of(case: Case, num_replicas: int) -> list[SimRequest]:
    """Poisson arrivals at the rate, the demand's own lengths in their order, shared prefixes as one prefix."""
    demand = case.demand
    number = min(MOST, max(LEAST, EACH_REPLICA * num_replicas, ROUNDS_OF_CLOSED * (demand.concurrency or 0)))
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(1 / demand.rate, number)) if demand.rate else np.zeros(number)
    lengths = demand.lengths or ((demand.prompt_tokens, demand.output_tokens),)
    ids = (0,) if demand.shared_tokens else ()
    return [
        SimRequest(float(at), max(prompt, demand.shared_tokens + 1), answer, ids, demand.shared_tokens or 1)
        for at, (prompt, answer) in zip(arrivals, _repeated(lengths, number), strict=True)
    ]  # fmt: skip


def _repeated(lengths: tuple[tuple[int, int], ...], number: int) -> list[tuple[int, int]]:
    times = math.ceil(number / len(lengths))
    return list((lengths * times)[:number])


def steady_percentiles(result: SimResult) -> dict[str, dict[str, float]]:
    """{ttft_ms, tpot_ms: {mean, p50, p95, p99}} without the first requests; infinite where nothing was answered."""
    kept, found = settled(result), {}
    for name, values in (("ttft_ms", result.ttft_s), ("tpot_ms", result.tpot_s)):
        rows = 1e3 * values[kept & ~np.isnan(values)]
        found[name] = _ladder(rows)
    return found


def settled(result: SimResult) -> Any:
    """Which requests count: those that were answered, but for the first, which found the server empty."""
    kept = result.done.copy()
    kept[: int(len(kept) * SETTLING)] = False
    return kept


def _ladder(rows: Any) -> dict[str, float]:
    names = ("p50", "p95", "p99")
    if not len(rows):
        return {"mean": 0.0} | dict.fromkeys(names, 0.0)
    steps = np.percentile(rows, [50, 95, 99]).tolist()
    return {"mean": float(rows.mean())} | dict(zip(names, steps, strict=True))
