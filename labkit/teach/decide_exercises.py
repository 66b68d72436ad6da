"""Lesson 07's exercises: queue before work, and no axis without a job. Both are held against the planner itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from labkit.measure.binding import DOMINANT
from labkit.model.spec import load_spec
from labkit.plan.candidates import Candidate, all_candidates, degrees
from labkit.plan.case import Case
from labkit.plan.choose import minimal
from labkit.plan.diagnose import diagnose
from labkit.plan.findings import FULL_KV
from labkit.plan.hardware import load_hardware
from labkit.plan.objective import PlanObjective
from labkit.plan.situations import SITUATIONS
from labkit.teach.checks import Check, Problem, show_check

BY_CODE = {one.code: one for one in SITUATIONS}



def short_of(ttft_ms: float, queue_ms: float, kv_use: float, limit_ms: float) -> str:
    """The solution: queue before work, and what the queue waits for before the queue."""
    if ttft_ms <= limit_ms:
        return "nothing"
    if ttft_ms - queue_ms > limit_ms and queue_ms < DOMINANT * ttft_ms:
        return "work"
    return "KV memory" if kv_use >= FULL_KV else "ranks"


_SHORT = {"none": "nothing", "KV memory": "KV memory", "queue": "ranks", "compute": "work"}
_RUNS = (
    (400.0, 300.0, 0.50, 500.0, "the wish is met: most of it is queue, and nobody minds"),
    (900.0, 700.0, 0.98, 500.0, "it waits, and KV is full"),
    (900.0, 700.0, 0.40, 500.0, "it waits, and KV has room: the ranks are busy"),
    (900.0, 100.0, 0.40, 500.0, "hardly a queue, and the prompt alone is too long"),
    (900.0, 100.0, 0.99, 500.0, "KV is full and nobody waits for it: the work is too long all the same"),
    (2000.0, 1200.0, 0.30, 500.0, "the work alone would miss, but first the queue must go: then look again"),
)


def check_short_of(function: Callable[..., Any]) -> Check:
    """Held against `labkit.plan.diagnose`, which gets the same figures as a run."""
    problems = []
    for ttft, queue, kv_use, limit, why in _RUNS:
        found = diagnose(_as_run(ttft, queue, kv_use), PlanObjective(ttft_ms=limit, percentile="p50"))
        problems.append(Problem((ttft, queue, kv_use, limit), _SHORT[found.resource], why))
    return show_check(function, problems)


def _as_run(ttft_ms: float, queue_ms: float, kv_use: float) -> dict[str, Any]:
    """A summary with nothing but these figures in it, as a production engine's gauges would leave it."""
    gauges = {"kv_use": {"mean": kv_use, "max": kv_use}}
    return {
        "ttft_ms": {"p50": ttft_ms, "n": 100}, "tpot_ms": {"p50": 10.0, "n": 100},
        "ttft_parts_ms": {"queue": queue_ms, "prefill_compute": ttft_ms - queue_ms},
        "engine": {"name": "exercise", "metrics": gauges},
    }  # fmt: skip


def smallest(rows: Sequence[tuple[tuple[int, ...], bool]]) -> list[tuple[int, ...]]:
    """The solution: those that do, and of which no other that does is nowhere larger."""
    doing = [grid for grid, does in rows if does]
    return [
        grid for grid in doing
        if not any(other != grid and all(a <= b for a, b in zip(other, grid, strict=True)) for other in doing)
    ]  # fmt: skip


def check_smallest(function: Callable[..., Any]) -> Check:
    """Held against the planner's own choice, on every layout of two situations, and on three made-up ones."""
    cases = [
        ([((1, 1), False), ((2, 1), True), ((1, 2), True), ((2, 2), True)], "two ways on two GPUs: both are kept"),
        ([((1, 1), True), ((2, 1), True), ((4, 1), True)], "nothing is needed"),
        ([((1, 1), False), ((2, 2), False)], "nothing does"),
    ]
    problems = [Problem((rows,), smallest(rows), why, f"{len(rows)} layouts of dp × tp") for rows, why in cases]
    for code in ("queue", "one-answer"):
        found = _candidates(code)
        rows = [(degrees(one.grid), one.does) for one in found]
        kept = [degrees(one.grid) for one in minimal([one for one in found if one.does])]
        shown = f"{len(rows)} layouts of {BY_CODE[code].gpus}"
        problems.append(Problem((rows,), kept, BY_CODE[code].title, shown))

    def in_order(rows: Sequence[tuple[tuple[int, ...], bool]]) -> list[tuple[int, ...]]:
        return sorted(function(rows))

    in_order.__name__ = getattr(function, "__name__", "smallest")
    return show_check(in_order, [_sorted(problem) for problem in problems])


def _sorted(problem: Problem) -> Problem:
    return Problem(problem.args, sorted(problem.expected), problem.why, problem.shown)


@lru_cache(maxsize=4)
def _candidates(code: str) -> list[Candidate]:
    """Legal layouts of a situation's GPUs under its traffic."""
    one = BY_CODE[code]
    case = Case(load_spec(one.model), load_hardware(one.gpus), one.demand, one.objective)
    return [found for found in all_candidates(case) if found.legal]
