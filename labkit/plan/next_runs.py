"""What to measure next: what a diagnosis could not tell, the load test of the outcome, what a check could not tell."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.layout import Layout
from labkit.plan.candidates import Candidate
from labkit.plan.case import Case
from labkit.plan.checks import NOT_MEASURED, Check
from labkit.plan.diagnose import Diagnosis
from labkit.said import say


def next_runs(
    case: Case, chosen: Candidate | None, checks: Sequence[Check], diagnosis: Diagnosis | None
) -> tuple[str, ...]:
    """Sentences or commands, the most telling first, each once."""
    found = list(diagnosis.measure) if diagnosis else []
    if chosen is not None:
        found.append(say("the load test of {layout} at {load} (among the commands): it holds the prediction against "
                         "what a user sees", layout=chosen.layout, load=case.demand.load))  # fmt: skip
    found += [check.measure for check in checks if check.status == NOT_MEASURED and check.measure]
    if chosen is not None and isinstance(chosen.layout, Layout) and diagnosis is None:
        found.append(say("labkit run --layout {layout} --concurrency 1: the low end of the load, to tell the work "
                         "from the queue", layout=chosen.layout.slug))  # fmt: skip
    return tuple(dict.fromkeys(found))
