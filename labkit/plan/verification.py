"""The simulator's look at what the closed form chose: the engine's own scheduler on a virtual clock, real lengths.

The closed form takes every request as the mean one; a few hundred requests with their own lengths and arrivals show
what that hides (a long prompt among short ones, a burst, KV that fills for a moment). What it refuses is not chosen. It
is the experiment that `labkit simulate` makes of the same load (`labkit.plan.experiment`).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from labkit.plan.candidates import Candidate
from labkit.plan.case import Case
from labkit.plan.experiment import num_requests, served
from labkit.plan.objective import judge
from labkit.plan.simulate import SimRequest, SimResult
from labkit.said import say, with_semicolons

NOISE = 0.05
"""Of a limit: what p95 of a few hundred requests is known to; what misses by less is not refused."""


def verified(case: Case, candidate: Candidate) -> Candidate:
    """The candidate with what a simulation of it says: {does, ttft_ms, tpot_ms, outcomes, sentence, …}."""
    result = simulated(case, candidate)
    percentiles = steady_percentiles(result)
    tokens = tokens_per_s(result)
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
    layout, concurrency = candidate.layout, case.demand.concurrency or 0
    return served(
        requests_of(case, num_requests(layout, concurrency)), layout, case.spec, case.hardware, candidate.settings,
        case.engine, concurrency=concurrency,
    )  # fmt: skip


def requests_of(case: Case, number: int) -> list[SimRequest]:
    """Poisson arrivals at the rate, the demand's own lengths in their order, shared prefixes as one prefix."""
    demand = case.demand
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
    """{ttft_ms, tpot_ms: {mean, p50, p95, p99}} of the requests that count; 0 where nothing was answered."""
    found = result.percentiles(result.steady())
    return {name: {q: found[name][q] for q in ("mean", "p50", "p95", "p99")} for name in ("ttft_ms", "tpot_ms")}


def tokens_per_s(result: SimResult) -> float:
    """Output tokens a second, of all answers together."""
    within, span_s = result.rate_span
    return float(result.output_tokens[within].sum()) / max(span_s, 1e-9)
