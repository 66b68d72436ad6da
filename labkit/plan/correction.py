"""Where a measurement and the prediction of the same layout disagree: plan for what was measured.

A layout that was measured to miss a wish which the prediction says it meets is slower than the cost model thinks. If it
missed beside others, it behaves like one under more load: everything is then planned for the load at which the
prediction misses too. If it missed alone, the wish is asked of all predictions by as much stricter as this one was too
good.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from labkit.layout import Layout
from labkit.plan.candidates import evaluate
from labkit.plan.case import Case
from labkit.plan.diagnose import Diagnosis
from labkit.plan.objective import Outcome, PlanObjective

MOST = 64.0
HALVINGS = 10
BEYOND = 1.1
"""Of the load at which the prediction begins to miss: that it does so for certain."""


@dataclass(frozen=True)
class Correction:
    case: Case
    sentence: str = ""
    """Empty where nothing had to be corrected."""


def corrected(case: Case, base: Layout, diagnosis: Diagnosis | None) -> Correction:
    """The case to plan for. Unchanged without a measurement, or where the prediction misses as the measurement does."""
    missed = next((one for one in diagnosis.outcomes if not one.met), None) if diagnosis else None
    if diagnosis is None or missed is None or not evaluate(case, base).does:
        return Correction(case)
    factor = _load_factor(case, base) if diagnosis.load == "high" else None
    if factor is not None:
        now = case.demand.rate or case.demand.concurrency or 0
        sentence = f"{base} was predicted to do at {case.demand.load} and was measured not to: planned for " \
                   f"{factor:.2g} times that load, where the prediction misses too."  # fmt: skip
        return Correction(replace(case, demand=case.demand.at_load(now * factor)), sentence)
    stricter = _stricter(case, base, missed)
    sentence = f"{base} was predicted to do and was measured not to ({missed}): every prediction is asked so much more."
    return Correction(replace(case, objective=stricter), sentence)


def _load_factor(case: Case, base: Layout) -> float | None:
    """The least multiple of the load at which the prediction misses; None where none up to MOST does."""
    now = case.demand.rate or case.demand.concurrency or 0

    def does(factor: float) -> bool:
        return evaluate(replace(case, demand=case.demand.at_load(now * factor)), base).does

    low, high = 1.0, 2.0
    while high <= MOST and does(high):
        low, high = high, 2 * high
    if high > MOST:
        return None
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if does(middle) else (low, middle)
    return high * BEYOND


def _stricter(case: Case, base: Layout, missed: Outcome) -> PlanObjective:
    predicted = evaluate(case, base).outcome(missed.metric)
    asked = case.objective
    if predicted is None or not predicted.value or not missed.value:
        return asked
    ratio = predicted.value / missed.value  # below 1 for a latency, above 1 for tokens a second
    names = {"ttft": "ttft_ms", "tpot": "tpot_ms", "answer_tokens": "answer_tokens_per_s",
             "server_tokens": "server_tokens_per_s"}  # fmt: skip
    limits: dict[str, Any] = {names[missed.metric]: missed.limit * ratio}
    return replace(asked, **limits)
