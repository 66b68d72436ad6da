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
from labkit.said import say, with_commas

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
        gpus = num_gpus(candidate.num_gpus - chosen.num_gpus)
        return say("{layout} meets every wish, with {gpus} more than {chosen}.", layout=candidate.layout, gpus=gpus,
                   chosen=chosen.layout)  # fmt: skip
    if candidate.num_gpus < chosen.num_gpus:
        return say("{layout} meets every wish on fewer GPUs, by another way to hold the model: more changes.",
                   layout=candidate.layout)  # fmt: skip
    return say("{layout} meets every wish on as many GPUs; {chosen} does it with fewer axes, without slow links for "
               "frequent collectives, or with more of what was short.", layout=candidate.layout,
               chosen=chosen.layout)  # fmt: skip


def num_gpus(n: int) -> str:
    return say("{n} GPU", n=n) if n == 1 else say("{n} GPUs", n=n)


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
            told = say("No layout of {n} GPUs reaches {wish} {limit} with this traffic; the nearest is {value}, by "
                       "{layout}.", n=case.hardware.num_gpus, wish=best.name, limit=phrase(metric, best.limit),
                       value=amount(metric, best.value), layout=one.layout)  # fmt: skip
            return Infeasible(metric, told, best, one.layout.slug, *nearest)
    if all(outcome.met for outcome in near.outcomes):
        told = say("{layout} meets the latencies, but {reason}", layout=near.layout, reason=near.reason)
        return Infeasible("kv", told, None, near.layout.slug, *nearest)
    figures = (say("{wish} {value}", wish=one.name, value=amount(one.metric, one.value)) for one in near.outcomes)
    told = say("Each wish can be met, but no layout of {n} GPUs meets all of them together; the nearest is {layout}: "
               "{figures}.", n=case.hardware.num_gpus, layout=near.layout, figures=with_commas(figures))  # fmt: skip
    return Infeasible("both", told, None, "", *nearest)


def _plainness(one: Candidate) -> tuple[int, ...]:
    return simplicity(one.layout) if isinstance(one.layout, Layout) else (one.num_gpus, 9)


def _nothing_serves(case: Case, layouts: Sequence[Candidate]) -> Infeasible:
    tried = [one for one in layouts if one.prediction is not None]
    if tried:
        best = max(tried, key=lambda one: one.prediction.requests_per_s if one.prediction else 0.0)
        assert best.prediction is not None
        told = say("No layout of {n} GPUs keeps up with {load}; the most is {rate:.3g} requests/s, by {layout}.",
                   n=case.hardware.num_gpus, load=case.demand.load, rate=best.prediction.requests_per_s,
                   layout=best.layout)  # fmt: skip
        return Infeasible("rate", told, None, best.layout.slug, best.outcomes, best.layout.slug)
    legal = [one for one in layouts if one.legal]
    most = max(legal, key=lambda one: (one.num_gpus, isinstance(one.layout, Layout) and one.grid.dp == 1), default=None)
    why = most.reason if most else say("no layout is legal")
    told = say("{model} does not fit {n} GPUs of {device} in any layout: {why}", model=case.spec.name,
               n=case.hardware.num_gpus, device=case.hardware.device.title, why=why)  # fmt: skip
    return Infeasible("memory", told)
