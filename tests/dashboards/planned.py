"""Plans for the drawing tests: the planner's own, of cases that break a drawing, made once a session."""

from __future__ import annotations

import functools
import re
from typing import Any

from labkit.show.frame import to_message
from labkit.show.i18n import in_parts
from labkit.show.planner_frame import Here, PlannerFrame, Trial, TrialRow
from labkit.show.planner_inputs import Inputs, options
from labkit.show.planner_source import PlannerSource, plan_of, question_of

CASES = {
    "two gpus": Inputs(n=1, model="llama-3.1-8b", num_gpus=2),
    "nothing does": Inputs(n=1, num_gpus=2, rate=40.0),
    "does not fit": Inputs(n=1, device="rtx4090", num_gpus=2, concurrency=8, load="concurrency"),
}


@functools.cache
def planned(name: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(plan, card, options) as the page gets them."""
    inputs = CASES[name]
    plan = plan_of(inputs) | {"n": inputs.n, "took_s": 0.0}
    source = PlannerSource()
    source._plan, source._planned_for = plan, question_of(inputs)
    return to_message(in_parts(plan)), to_message(in_parts(source.card(inputs))), options()


def in_english(told: Any) -> str:
    """A sentence in parts, as the page is to show it."""
    if isinstance(told, str):
        return told
    return re.sub(r"\{(\w+)\}", lambda place: in_english(told["of"][place[1]]), told["said"])


def frame(trial: Trial | None = None, here: bool = True) -> PlannerFrame:
    found = Here("lab-30m", 2, ["tp1", "tp2", "dp2"]) if here else None
    return PlannerFrame(link="connected" if here else "offline", provenance="predicted", here=found, trial=trial)


def trial(calibrated: bool = True) -> Trial:
    figures = {"ttft": (180.0, 640.0, 196.0, 702.0), "tpot": (21.0, 33.0, 20.2, 39.5)}
    rows = [
        TrialRow(metric, f"{metric.upper()} {name}", values[at] if calibrated else None,
                 values[at] * 0.8 if calibrated else None, values[at] * 1.3 if calibrated else None, values[at + 2], 84)
        for metric, values in figures.items()
        for at, name in enumerate(("p50", "p95"))
    ]  # fmt: skip
    told = ("2026-03-01T10:00:00+00:00", ["Others had 0.72 of 2 cores."]) if calibrated else ("", [])
    return Trial("tp2", "lab-30m", "chat", 2.0, "running", 0, 84, calibrated, rows, *told)
