"""How advice is found: settings before axes, the smallest layout that does, and the simulator's look at it.

What the simulator refuses is not chosen, and what it lets pass a step below the choice is taken instead; what a run
measured to fail does not do, whatever is predicted of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from labkit.layout import AnyLayout, Layout
from labkit.layout.choices import simplicity
from labkit.plan.candidates import Candidate
from labkit.plan.case import Case
from labkit.plan.checks import FAILED, all_checks
from labkit.plan.choose import allowed, lowered, pcp_has_its_job, smallest
from labkit.plan.diagnose import Diagnosis
from labkit.plan.findings import NONE, NOT_MEASURED
from labkit.plan.limits import INTERFERENCE, Limit, limit_of
from labkit.plan.pools import pool_candidates
from labkit.plan.rank_places import place_ranks
from labkit.plan.remedies import Remedy, engine_remedies
from labkit.plan.verification import refused_by, verified
from labkit.plan.walk_path import Path
from labkit.plan.work import EngineSettings
from labkit.said import in_turn, say

TRIED_WITH_SETTINGS = 3
"""Layouts of fewer GPUs than the one that does, nearest to the wishes, on which settings are tried too."""
LOOKS = 8
"""How often the simulator may disagree before its last word is shown as it is, as a failed check."""

Failed = dict[tuple[AnyLayout, EngineSettings], tuple[str, str]]
"""What a measurement or a simulation refused: (fault, reason)."""
Passed = dict[tuple[AnyLayout, EngineSettings], Candidate]
"""What a simulation let pass that the prediction refused."""


@dataclass(frozen=True)
class Asked:
    case: Case
    table: list[Candidate]
    base: Candidate
    given: bool
    diagnosis: Diagnosis | None
    verify: bool
    known: dict[tuple[str, AnyLayout, str], list[Any]] = field(default_factory=dict)
    """What was tried once: settings by layout and limit, pools by their number of GPUs."""

    def remedies(self, one: Candidate, limit: Limit) -> list[Remedy]:
        key = ("settings", one.layout, limit.resource + limit.cause)
        if key not in self.known:
            self.known[key] = engine_remedies(self.case, one, limit)
        return self.known[key]

    def pools(self, most: int) -> list[Candidate]:
        key = ("pools", self.base.layout, str(most))
        if key not in self.known:
            self.known[key] = pool_candidates(self.case, most)
        return self.known[key]


def settle(asked: Asked) -> Path:
    """Choose, let the simulator look at it and at what is a step smaller, and choose again as long as it disagrees."""
    failed = _measured_to_fail(asked.base, asked.diagnosis)
    passed: Passed = {}
    slower: Slower = {}
    refusals: list[Path] = []
    for _ in range(LOOKS):
        path = _find(asked, _marked(asked.table, failed, passed, slower), failed)
        if not asked.verify or path.chosen is None:
            break
        key = (path.chosen.layout, path.chosen.settings)
        looked = passed.get(key) or verified(asked.case, path.chosen)
        path, refused = replace(path, chosen=looked), refused_by(looked) or _failed_check(asked, path, looked)
        if refused is None:
            smaller = _smaller_that_does(asked, path, failed)
            if smaller is None:
                return path
            passed[smaller.layout, smaller.settings] = smaller
            continue
        failed[key] = refused
        passed.pop(key, None)
        _note_slower(slower, looked)
        refusals.append(replace(path, chosen=replace(looked, fault=refused[0], reason=refused[1])))
    return min(refusals, key=_simulated_ratio) if refusals and asked.verify and path.chosen is not None else path


def _failed_check(asked: Asked, path: Path, candidate: Candidate) -> tuple[str, str] | None:
    """(fault, reason) of the first check of an axis that fails, where the axis is new: what serves, or holds the model,
    is not given up for it."""
    case = asked.case
    places = place_ranks(candidate.layout, case.spec, case.hardware, case.demand.prompt_tokens, case.demand.tokens_each)
    new = {axis for axis in path.axes if getattr(candidate.layout, axis) != getattr(asked.base.layout, axis)} | {"pd"}
    for check in all_checks(case, candidate, places):
        if check.axis in new and check.status == FAILED:
            return "check", say("{layout} fails {axis}'s check of {check}: {found}", layout=candidate.layout,
                                axis=check.axis, check=check.name, found=check.sentence)  # fmt: skip
    return None


def _simulated_ratio(path: Path) -> float:
    assert path.chosen is not None and path.chosen.verified is not None
    return float(path.chosen.verified["ratio"])


Slower = dict[tuple[bool, ...], float]
"""Kind of layout → how many times slower its TPOT was simulated than predicted."""


def _kind(layout: AnyLayout) -> tuple[bool, ...]:
    """What the closed form may be wrong about alike: stages, replicas in lockstep, shared positions, pools."""
    if not isinstance(layout, Layout):
        return (True,)
    return (False, layout.pp > 1, layout.attention_dp, layout.pcp > 1, layout.dcp > 1)


def _note_slower(slower: Slower, looked: Candidate) -> None:
    """Of TPOT: a TTFT in a queue that is full is no measure of another."""
    if looked.prediction is None or looked.verified is None:
        return
    ratio = looked.verified["tpot_ms"]["p95"] / max(looked.prediction.tpot_ms["p95"], 1e-9)
    kind = _kind(looked.layout)
    slower[kind] = max(slower.get(kind, 1.0), ratio)


def _smaller_that_does(asked: Asked, path: Path, failed: Failed) -> Candidate | None:
    """Of the layouts with a step less of one axis, one that the prediction refuses and the simulator does not. Where
    the queue grows without end a few hundred requests are no answer: that is left to the prediction."""
    if path.chosen is None or not isinstance(path.chosen.layout, Layout) or path.takes(path.base):
        return None
    for axis in path.axes:
        less = lowered(path.candidates, path.chosen.grid, axis)
        if less is None or less.does or less.prediction is None or less.fault == "overload":
            continue
        if less.worst is not None and less.worst.sure:  # missed by more than the prediction's error
            continue
        key = (less.layout, less.settings)
        if key in failed:
            continue
        looked = verified(asked.case, less)
        if looked.verified is not None and all(row["met"] for row in looked.verified["outcomes"]):
            return replace(looked, fault="", reason="")
        failed[key] = refused_by(looked) or (less.fault, less.reason)
    return None


def _marked(
    table: Sequence[Candidate], failed: Failed, passed: Passed | None = None, slower: Slower | None = None
) -> list[Candidate]:
    """With what was refused, and why, and what the simulator lets pass against the prediction."""

    def marked(one: Candidate) -> Candidate:
        key = (one.layout, one.settings)
        if passed and key in passed:
            return passed[key]
        told = failed.get(key)
        if told is not None and told[1] != one.reason:
            return replace(one, fault=one.fault or told[0], reason=in_turn(told[1], one.reason))
        return _as_slow_as_its_kind(one, (slower or {}).get(_kind(one.layout), 1.0))

    return [marked(one) for one in table]


def _as_slow_as_its_kind(one: Candidate, ratio: float) -> Candidate:
    tpot = one.outcome("tpot")
    if not one.does or tpot is None or tpot.value * ratio <= tpot.limit:
        return one
    reason = say("{layout}: {figure}, but layouts of its kind were simulated {ratio:.1f} times slower than predicted.",
                 layout=one.layout, figure=tpot.sentence, ratio=ratio)  # fmt: skip
    return replace(one, fault="tpot", reason=reason)


def _find(asked: Asked, table: list[Candidate], failed: Failed) -> Path:
    case, diagnosis = asked.case, asked.diagnosis
    base = next((one for one in table if one.layout == asked.base.layout), asked.base)
    limit = _limit(case, base, diagnosis)
    measured = diagnosis is not None and diagnosis.resource != NOT_MEASURED
    path = Path(case, table, base, limit, base, measured=measured, given=asked.given)
    if base.does or (measured and limit.resource == NONE):
        return path
    engine = [_remedy_marked(one, failed) for one in asked.remedies(base, limit)]
    done = next((remedy.candidate for remedy in engine if remedy.does), None)
    pure = None if done else smallest(case, table, limit, base)
    chosen = done or _with_settings(asked, table, pure, failed) or pure
    pools: list[Candidate] = []
    if done is None and (limit.cause == INTERFERENCE or chosen is None):
        most = chosen.num_gpus - 1 if chosen else case.hardware.num_gpus
        pools = _marked(asked.pools(most), failed)
        chosen = next((one for one in pools if one.does), chosen)
    return replace(path, chosen=chosen, engine=tuple(engine), pools=tuple(pools))


def _remedy_marked(remedy: Remedy, failed: Failed) -> Remedy:
    one = remedy.candidate
    told = failed.get((one.layout, one.settings)) if one else None
    if told is None:
        return remedy
    sentence = say("{remedy}, but not simulated: {reason}", remedy=remedy.sentence, reason=told[1])
    return replace(remedy, does=False, sentence=sentence)


def _with_settings(
    asked: Asked, table: Sequence[Candidate], pure: Candidate | None, failed: Failed
) -> Candidate | None:
    """A layout of fewer GPUs, by the same rules of placement, that does with another setting."""
    case, have = asked.case, asked.base.num_gpus
    fewer = [one for one in table if one.outcomes and not one.does and pcp_has_its_job(table, one)]
    if pure is not None:
        most = max(pure.num_gpus, have)
        fewer = [one for one in fewer if max(one.num_gpus, have) < most and one in allowed(case, [pure, one])]
    nearest = sorted(fewer, key=lambda one: (max(o.ratio for o in one.outcomes), simplicity(one.grid)))
    tried: list[Remedy] = []
    for one in nearest[:TRIED_WITH_SETTINGS]:
        tried += [_remedy_marked(remedy, failed) for remedy in asked.remedies(one, limit_of(case, one))]
    doing = [remedy.candidate for remedy in tried if remedy.does and remedy.candidate]
    return min(doing, key=lambda one: simplicity(one.grid), default=None)


def _limit(case: Case, base: Candidate, diagnosis: Diagnosis | None) -> Limit:
    if diagnosis is None or diagnosis.resource == NOT_MEASURED:
        return limit_of(case, base)
    return Limit.measured(diagnosis)


def _measured_to_fail(base: Candidate, diagnosis: Diagnosis | None) -> Failed:
    """A layout that was measured to miss a wish does not do, whatever is predicted of it."""
    missed = next((outcome for outcome in diagnosis.outcomes if not outcome.met), None) if diagnosis else None
    if missed is None:
        return {}
    told = say("{layout} was measured: {missed}.", layout=base.layout, missed=missed.sentence)
    return {(base.layout, base.settings): (missed.metric, told)}
