"""Every layout of so many GPUs held against the same traffic: does it fit, does it queue, what does it predict.

A candidate that is refused keeps its sentence: what the model forbids, what does not fit, what waits for KV, which wish
is missed and by how much. The same arithmetic for all, so that they can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from labkit.layout import AXES, AnyLayout, Layout, LayoutError, pools_of
from labkit.layout.choices import candidate_layouts, simplicity
from labkit.layout.legality import reasons_against
from labkit.plan.case import Case, predict
from labkit.plan.memory import MemoryPlan, memory_on
from labkit.plan.objective import Outcome, judge, spoken_ms
from labkit.plan.predict import Prediction
from labkit.plan.work import EngineSettings
from labkit.said import in_turn, said_by, say


@dataclass(frozen=True)
class Candidate:
    """One layout (with the engine's settings as they would be) under the case's traffic."""

    layout: AnyLayout
    settings: EngineSettings
    legal: bool
    fits: bool
    queues: bool
    """Requests wait for KV at this load."""
    reason: str
    """Why it does not do; empty where it does."""
    fault: str = ""
    """In a word: illegal, memory, kv, overload, ttft, tpot, answer_tokens, server_tokens, check; empty: it does."""
    memory: MemoryPlan | None = None
    most_requests: int = 0
    """Of the expected length, that hold KV at once."""
    prediction: Prediction | None = None
    outcomes: tuple[Outcome, ...] = ()
    tokens_per_gpu: float | None = None
    """Output tokens per second and GPU."""
    cost_per_million: float | None = None
    """$ for a million output tokens."""
    verified: Mapping[str, Any] | None = None
    """What a simulation of it said, where one was made."""

    @property
    def does(self) -> bool:
        """It is allowed, fits, keeps up and meets every wish."""
        return not self.fault

    @property
    def num_gpus(self) -> int:
        return self.layout.world_size

    @property
    def grid(self) -> Layout:
        """The layout; only of one that is no pools."""
        assert isinstance(self.layout, Layout)
        return self.layout

    def outcome(self, metric: str) -> Outcome | None:
        return next((outcome for outcome in self.outcomes if outcome.metric == metric), None)

    @property
    def worst(self) -> Outcome | None:
        return max(self.outcomes, key=lambda outcome: outcome.ratio, default=None)

    def figure(self, metric: str, percentile: str) -> float:
        """A latency in ms or tokens per second; infinite (or 0) where nothing is predicted."""
        if self.prediction is None:
            return 0.0 if metric == "server_tokens" else math.inf
        if metric == "server_tokens":
            return self.prediction.tokens_per_s
        table = self.prediction.ttft_ms if metric == "ttft" else self.prediction.tpot_ms
        return table.get(percentile, math.inf)

    def to_dict(self) -> dict[str, Any]:
        return {
            "layout": self.layout.slug,
            "name": str(self.layout),
            "num_gpus": self.num_gpus,
            "legal": self.legal,
            "fits": self.fits,
            "queues": self.queues,
            "does": self.does,
            "reason": self.reason,
            "fault": self.fault,
            "kv_tokens": self.memory.kv_tokens if self.memory else None,
            "most_requests": self.most_requests,
            "predictions": prediction_dict(self.prediction),
            "outcomes": [outcome.to_dict() for outcome in self.outcomes],
            "tokens_per_gpu": self.tokens_per_gpu,
            "cost_per_million": self.cost_per_million,
            "verified": dict(self.verified) if self.verified else None,
        }


def prediction_dict(prediction: Prediction | None) -> dict[str, Any] | None:
    if prediction is None:
        return None
    return {
        "ttft_ms": _finite(prediction.ttft_ms),
        "tpot_ms": _finite(prediction.tpot_ms),
        "requests_per_s": prediction.requests_per_s,
        "tokens_per_s": prediction.tokens_per_s,
        "concurrency": _number(prediction.concurrency),
        "kv_full": prediction.kv_full,
        "queue_ms": _number(prediction.queue_ms),
        "band_ttft": prediction.band_ttft,
        "band_tpot": prediction.band_tpot,
        "source": prediction.source,
    }


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _number(value) for name, value in values.items()}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


# ---- all of them


def all_candidates(case: Case) -> list[Candidate]:
    """Every well-formed layout of at most the hardware's GPUs, simplest first."""
    found = sorted(candidate_layouts(case.hardware.num_gpus), key=simplicity)
    return [evaluate(case, layout) for layout in found]


def evaluate(case: Case, layout: Layout, settings: EngineSettings | None = None) -> Candidate:
    """One layout, with the case's settings or others."""
    settings = settings or case.settings
    reasons = reasons_against(layout, case.spec, case.hardware.num_gpus)
    if not reasons:
        reasons = tuple(filter(None, (engine_reason(case.engine, layout),)))
    if reasons:
        return Candidate(layout, settings, False, False, False, in_turn(*reasons), "illegal")
    memory = memory_on(layout, case.spec, case.hardware, settings)
    if not memory.fits:
        return Candidate(layout, settings, True, False, False, memory.reason, "memory", memory)
    if memory.kv_tokens < case.demand.longest_tokens:
        reason = say(
            "{layout}: the longest request has {tokens:,} tokens, and a replica holds KV for {held:,}.",
            layout=layout, tokens=case.demand.longest_tokens, held=memory.kv_tokens,
        )  # fmt: skip
        return Candidate(layout, settings, True, False, True, reason, "memory", memory)
    return judged(case, layout, settings, memory, predict(case, layout, settings))


@lru_cache(maxsize=4096)
def engine_reason(engine: str, layout: Layout) -> str:
    """Why an engine cannot be told this layout; empty where it can (labkit's own runs all of them)."""
    if engine == "labkit":
        return ""
    from labkit.plan.engine_flags import flags_of

    try:
        flags_of(engine, layout)
    except LayoutError as error:
        return said_by(error)
    return ""


def judged(
    case: Case, layout: AnyLayout, settings: EngineSettings, memory: MemoryPlan, prediction: Prediction
) -> Candidate:
    """A candidate from its memory and its prediction."""
    outcomes = tuple(judge(case.objective, prediction.ttft_ms, prediction.tpot_ms, prediction.tokens_per_s,
                           band_ttft=prediction.band_ttft, band_tpot=prediction.band_tpot))  # fmt: skip
    most = memory.most_requests(case.demand.tokens_each)
    needed = case.demand.concurrency or prediction.concurrency
    queues = bool(prediction.kv_full or needed > most)
    fault, reason = _fault(case, layout, outcomes, prediction, most, needed)
    per_gpu = prediction.tokens_per_s / layout.world_size
    return Candidate(
        layout, settings, True, True, queues, reason, fault, memory, most, prediction, outcomes, per_gpu,
        cost_of(per_gpu, case.price),
    )  # fmt: skip


def cost_of(tokens_per_gpu: float, price: float | None) -> float | None:
    """$ for a million output tokens of a GPU that makes so many a second and costs `price` an hour."""
    return price / (tokens_per_gpu * 3600) * 1e6 if price is not None and tokens_per_gpu > 0 else None


def _fault(
    case: Case, layout: AnyLayout, outcomes: tuple[Outcome, ...], prediction: Prediction, most: int, needed: float
) -> tuple[str, str]:  # fmt: skip
    missed = [outcome for outcome in outcomes if not outcome.met]
    waits = say("KV holds {most} requests of {tokens:,} tokens", most=most, tokens=case.demand.tokens_each)
    if (seqs := case.settings.max_num_seqs * sum(pool.layout.dp for pool in pools_of(layout))) < most:
        waits = say("steps hold {seqs} sequences (max_num_seqs)", seqs=seqs)
    if not math.isfinite(needed) or not math.isfinite(prediction.ttft_ms["mean"]):
        return "overload", _overload(case, layout, prediction, waits if prediction.kv_full else "")
    judged_by_ttft = case.objective.ttft_ms is not None
    if prediction.kv_full and (not judged_by_ttft or any(outcome.metric == "ttft" for outcome in missed)):
        return "kv", _queueing(layout, missed, waits, needed)
    if missed:
        worst = max(missed, key=lambda outcome: outcome.ratio)
        return worst.metric, _missing(layout, worst, prediction)
    return "", ""


def _overload(case: Case, layout: AnyLayout, prediction: Prediction, waits: str) -> str:
    given = {"layout": layout, "load": case.demand.load, "rate": prediction.requests_per_s}
    if waits:
        return say("{layout} cannot keep up with {load}: it does {rate:.3g} requests/s, and the queue grows without "
                   "end; {waits}.", **given, waits=waits)  # fmt: skip
    return say("{layout} cannot keep up with {load}: it does {rate:.3g} requests/s, and the queue grows without end.",
               **given)  # fmt: skip


def _queueing(layout: AnyLayout, missed: list[Outcome], waits: str, needed: float) -> str:
    if not missed:
        return say("{layout} will queue: {waits}, {n:.0f} are there.", layout=layout, waits=waits, n=needed)
    worst = max(missed, key=lambda outcome: outcome.ratio)
    return say("{layout} will queue: {waits}, {n:.0f} are there, so that {missed}.", layout=layout, waits=waits,
               n=needed, missed=worst.sentence)  # fmt: skip


def _missing(layout: AnyLayout, worst: Outcome, prediction: Prediction) -> str:
    if worst.metric != "ttft" or prediction.queue_ms < 0.3 * prediction.ttft_ms["mean"]:
        return say("{layout}: {missed}.", layout=layout, missed=worst.sentence)
    return say("{layout}: {missed} ({queue} of it in the queue on average).", layout=layout, missed=worst.sentence,
               queue=spoken_ms(prediction.queue_ms))  # fmt: skip


# ---- order among layouts


def degrees(layout: Layout) -> tuple[int, ...]:
    """To compare axis by axis; ep by its kind (none, in a stage, over replicas), since its degree follows others'."""
    ep = 0 if layout.ep == 1 else 2 if layout.attention_dp else 1
    return (*(getattr(layout, axis) for axis in AXES if axis != "ep"), ep)


def within(small: Layout, large: Layout) -> bool:
    """Whether `small` has nothing that `large` has not, and something less."""
    a, b = degrees(small), degrees(large)
    return a != b and all(one <= other for one, other in zip(a, b, strict=True))
