"""Why a layout was not chosen, in a sentence each and in groups; and which wish cannot be met by any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.layout import Layout
from labkit.layout.choices import simplicity
from labkit.plan.candidates import Candidate
from labkit.plan.case import Case
from labkit.plan.objective import METRICS, Outcome, amount, phrase

GROUPS = {
    "illegal": "the model, or the engine, does not allow it",
    "memory": "the model does not fit",
    "overload": "cannot keep up with the traffic",
    "kv": "requests wait for KV",
    "ttft": "TTFT is missed",
    "tpot": "TPOT is missed",
    "answer_tokens": "one answer is too slow",
    "server_tokens": "the server's tokens per second are too few",
    "check": "fails a check before it is deployed",
    "larger": "meets every wish on more GPUs",
    "more axes": "meets every wish with more axes, or less of what is short",
}


def group_of(candidate: Candidate, chosen: Candidate | None) -> str:
    """Of GROUPS, or empty for the chosen one."""
    if candidate.fault:
        return candidate.fault
    if chosen is None or candidate.layout == chosen.layout:
        return ""
    return "larger" if candidate.num_gpus > chosen.num_gpus else "more axes"


def why_not(candidate: Candidate, chosen: Candidate | None) -> str:
    """A sentence; empty for the chosen one."""
    group = group_of(candidate, chosen)
    if candidate.fault or not group or chosen is None:
        return candidate.reason
    if group == "larger":
        more = candidate.num_gpus - chosen.num_gpus
        gpus = f"{more} GPU{'s' if more > 1 else ''}"
        return f"{candidate.layout} meets every wish, with {gpus} more than {chosen.layout}."
    if candidate.num_gpus < chosen.num_gpus:
        return f"{candidate.layout} meets every wish on fewer GPUs, by another way to hold the model: more changes."
    return (
        f"{candidate.layout} meets every wish on as many GPUs; {chosen.layout} does it with fewer axes, without slow "
        "links for frequent collectives, or with more of what was short."
    )


def grouped(layouts: Sequence[Candidate], chosen: Candidate | None) -> list[tuple[str, str, list[Candidate]]]:
    """(group, what it means, layouts), in the order of GROUPS."""
    found: dict[str, list[Candidate]] = {}
    for one in layouts:
        group = group_of(one, chosen)
        if group:
            found.setdefault(group, []).append(one)
    return [(group, told, found[group]) for group, told in GROUPS.items() if group in found]


# ---- an objective that cannot be met


@dataclass(frozen=True)
class Infeasible:
    """`metric`: which wish no layout meets, or both, where each can be met but not together."""

    metric: str
    sentence: str
    best: Outcome | None = None
    """Of the metric, the nearest."""
    layout: str = ""
    nearest: tuple[Outcome, ...] = ()
    """All wishes, of the layout whose worst is missed least."""
    nearest_layout: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "sentence": self.sentence,
            "best": self.best.to_dict() if self.best else None,
            "layout": self.layout,
            "nearest": [outcome.to_dict() for outcome in self.nearest],
            "nearest_layout": self.nearest_layout,
        }


def infeasible(case: Case, layouts: Sequence[Candidate]) -> Infeasible:
    """Which wish it is, by how much, and the nearest that can be had."""
    able = [one for one in layouts if one.outcomes and one.fault != "overload"]
    if not able:
        return _nothing_serves(case, layouts)
    near = min(able, key=lambda one: (max(o.ratio for o in one.outcomes), _plainness(one)))
    nearest = (near.outcomes, near.layout.slug)
    for metric in METRICS:
        held = [(outcome, one) for one in able if (outcome := one.outcome(metric)) is not None]
        if held and not any(outcome.met for outcome, _ in held):
            best, one = min(held, key=lambda row: (row[0].ratio, _plainness(row[1])))
            return Infeasible(
                metric,
                f"No layout of {case.hardware.num_gpus} GPUs reaches {best.name} {phrase(metric, best.limit)} with "
                f"this traffic; the nearest is {amount(metric, best.value)}, by {one.layout}.",
                best, one.layout.slug, *nearest,
            )  # fmt: skip
    if all(outcome.met for outcome in near.outcomes):
        told = f"{near.layout} meets the latencies, but {near.reason}"
        return Infeasible("kv", told, None, near.layout.slug, *nearest)
    told = ", ".join(f"{outcome.name} {amount(outcome.metric, outcome.value)}" for outcome in near.outcomes)
    return Infeasible(
        "both", f"Each wish can be met, but no layout of {case.hardware.num_gpus} GPUs meets all of them together; the "
        f"nearest is {near.layout}: {told}.", None, "", *nearest,
    )  # fmt: skip


def _plainness(one: Candidate) -> tuple[int, ...]:
    return simplicity(one.layout) if isinstance(one.layout, Layout) else (one.num_gpus, 9)


def _nothing_serves(case: Case, layouts: Sequence[Candidate]) -> Infeasible:
    tried = [one for one in layouts if one.prediction is not None]
    if tried:
        best = max(tried, key=lambda one: one.prediction.requests_per_s if one.prediction else 0.0)
        assert best.prediction is not None
        return Infeasible("rate", f"No layout of {case.hardware.num_gpus} GPUs keeps up with {case.demand.load}; the "
                          f"most is {best.prediction.requests_per_s:.3g} requests/s, by {best.layout}.", None,
                          best.layout.slug, best.outcomes, best.layout.slug)  # fmt: skip
    legal = [one for one in layouts if one.legal]
    most = max(legal, key=lambda one: (one.num_gpus, isinstance(one.layout, Layout) and one.grid.dp == 1), default=None)
    why = most.reason if most else "no layout is legal"
    return Infeasible("memory", f"{case.spec.name} does not fit {case.hardware.num_gpus} GPUs of "
                      f"{case.hardware.device.title} in any layout: {why}")  # fmt: skip
