"""What a prediction runs into first: the same words as a diagnosis of a run, from arithmetic instead of a measurement.

Queue before compute here too: a TTFT that would be met without its queue is the queue's, and what the queue waits for
is told apart (KV, the engine's own limits, the ranks). A TPOT that one answer alone would miss is a matter of what a
step reads; one that is missed only beside prompts is interference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from labkit.layout import AXES
from labkit.measure.binding import DOMINANT
from labkit.plan.candidates import Candidate
from labkit.plan.case import Case, computed_prompt, cost_of_step, decode_work, prefill_seconds, prefill_work
from labkit.plan.diagnose import Diagnosis
from labkit.plan.findings import BANDWIDTH, COMMUNICATION, COMPUTE, KV, NONE, PARAMETERS, QUEUE
from labkit.plan.objective import spoken_ms
from labkit.said import in_turn, say

INTERFERENCE = "interference"


@dataclass(frozen=True)
class Limit:
    """`resource`: of `labkit.plan.diagnose`; `cause`: a word for what it is about."""

    resource: str
    cause: str
    load: str
    """low: it fails alone; high: beside others; empty where nothing fails."""
    sentence: str
    figures: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def measured(cls, found: Diagnosis) -> Limit:
        """As a run showed it."""
        return cls(found.resource, found.cause, found.load, found.sentence)

    def to_dict(self) -> dict[str, Any]:
        return {"resource": self.resource, "cause": self.cause, "load": self.load, "sentence": self.sentence,
                "figures": self.figures}  # fmt: skip


def limit_of(case: Case, candidate: Candidate) -> Limit:
    """Of a layout that is legal."""
    fault = candidate.fault
    if not fault:
        return Limit(NONE, "met", "", say("{layout} meets every wish.", layout=candidate.layout))
    if fault == "memory":
        held = bool(candidate.memory and candidate.memory.fits)
        return Limit(KV if held else PARAMETERS, "kv of one request" if held else "weights", "low", candidate.reason)
    if fault in ("kv", "overload", "server_tokens"):
        return _behind_queue(case, candidate)
    if fault == "ttft":
        return _of_ttft(case, candidate)
    return _of_tpot(case, candidate)


def _behind_queue(case: Case, candidate: Candidate) -> Limit:
    """What the queue waits for."""
    assert candidate.prediction is not None
    seqs = candidate.settings.max_num_seqs * candidate.grid.dp
    figures = {"most_requests": candidate.most_requests, "max_num_seqs": seqs}
    if candidate.queues and candidate.most_requests < seqs:
        return Limit(KV, "kv-full", "high", candidate.reason, figures)
    if candidate.queues or (case.demand.concurrency or 0) > seqs:
        full = say("Steps are full at {seqs} sequences.", seqs=seqs)
        return Limit(QUEUE, "max_num_seqs", "high", in_turn(candidate.reason, full), figures)
    return Limit(QUEUE, "ranks busy", "high", candidate.reason, figures)


def _of_ttft(case: Case, candidate: Candidate) -> Limit:
    found, outcome = candidate.prediction, candidate.outcome("ttft")
    assert found is not None and outcome is not None
    alone_ms = unloaded_ttft_ms(case, candidate)
    figures = {"alone_ms": alone_ms, "queue_ms": found.queue_ms}
    if alone_ms > outcome.limit:
        share = comm_share(case, candidate, prefill=True)
        told = say("{layout}: a p95 prompt of {tokens:,} tokens alone takes {time} to its first token",
                   layout=candidate.layout, tokens=case.demand.long_prompt_tokens,
                   time=spoken_ms(alone_ms))  # fmt: skip
        if share >= DOMINANT:
            return Limit(COMMUNICATION, "transfer", "low", _in_collectives(told, share), figures)
        return Limit(COMPUTE, "prefill", "low", say("{told}.", told=told), figures)
    return _behind_queue(case, candidate)


def _of_tpot(case: Case, candidate: Candidate) -> Limit:
    found = candidate.prediction
    outcome = candidate.outcome("tpot") or candidate.outcome("answer_tokens")
    assert found is not None and outcome is not None
    limit_ms = 1e3 / outcome.limit if outcome.is_rate else outcome.limit
    alone, beside = pure_decode_ms(case, candidate, 1), pure_decode_ms(case, candidate, found.concurrency)
    figures = {"alone_ms": alone, "beside_ms": beside}
    if alone > limit_ms:
        share = comm_share(case, candidate, prefill=False)
        told = say("{layout}: one answer alone takes {time} a token", layout=candidate.layout, time=spoken_ms(alone))
        if share >= DOMINANT:
            return Limit(COMMUNICATION, "transfer", "low", _in_collectives(told, share), figures)
        return Limit(BANDWIDTH, "decode", "low", say("{told}: every step reads the weights.", told=told), figures)
    if beside <= limit_ms:
        told = say("{layout}: decodes alone would take {time} a token; prompts in the same steps make the rest.",
                   layout=candidate.layout, time=spoken_ms(beside))  # fmt: skip
        return Limit(COMPUTE, INTERFERENCE, "high", told, figures)
    told = say("{layout}: {n:.0f} answers at once take {time} a token, one alone {alone}.", layout=candidate.layout,
               n=found.concurrency, time=spoken_ms(beside), alone=spoken_ms(alone))  # fmt: skip
    return Limit(BANDWIDTH, "batch", "high", told, figures)


def _in_collectives(told: str, share: float) -> str:
    return say("{told}, {share:.0%} of it in collectives.", told=told, share=share)


def unloaded_ttft_ms(case: Case, candidate: Candidate) -> float:
    """Of a prompt as long as the p95 one, nothing else in the server."""
    cached = case.demand.prompt_tokens - computed_prompt(case.demand, candidate.settings)
    tokens = max(1, case.demand.long_prompt_tokens - cached)
    return 1e3 * prefill_seconds(cost_of_step(case, candidate.grid, candidate.settings), tokens, candidate.settings)


def pure_decode_ms(case: Case, candidate: Candidate, in_flight: float) -> float:
    """A decode step of what is in flight, shared out over replicas (and stages), at the mean context."""
    if not math.isfinite(in_flight):
        return math.inf
    layout = candidate.grid
    seqs = max(1, math.ceil(in_flight / layout.dp / layout.pp))
    context = case.demand.prompt_tokens + case.demand.output_tokens // 2
    return 1e3 * cost_of_step(case, layout, candidate.settings).seconds(decode_work(seqs, context))


def comm_share(case: Case, candidate: Candidate, *, prefill: bool) -> float:
    """Of a step's seconds, those in collectives and messages between ranks."""
    cost = cost_of_step(case, candidate.grid, candidate.settings)
    tokens = min(case.demand.prompt_tokens, candidate.settings.max_num_batched_tokens)
    work = prefill_work(tokens) if prefill else decode_work(1, case.demand.prompt_tokens)
    return communication(cost.parts(work)) / cost.seconds(work)


def communication(parts: dict[str, float]) -> float:
    """Seconds of the parts that are traffic between ranks: a step's cost names them by their axis."""
    return sum(parts.get(axis, 0.0) for axis in AXES)
