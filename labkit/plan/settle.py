"""How advice is found: settings before axes, the smallest layout that does, and the simulator's look at it.

What the simulator refuses is not chosen, and what it lets pass a step below the choice is taken instead; what a run
measured to fail does not do, whatever is predicted of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from labkit.layout import AnyLayout, Layout
from labkit.layout.choices import simplicity
from labkit.plan.candidates import Candidate
from labkit.plan.case import Case
from labkit.plan.choose import allowed, lowered, smallest
from labkit.plan.diagnose import Diagnosis
from labkit.plan.findings import NONE, NOT_MEASURED
from labkit.plan.limits import INTERFERENCE, Limit, limit_of
from labkit.plan.pools import pool_candidates
from labkit.plan.remedies import Remedy, engine_remedies, other_remedies
from labkit.plan.verification import refused_by, verified
from labkit.plan.walk import Path
from labkit.plan.work import EngineSettings

TRIED_WITH_SETTINGS = 3
"""Layouts of fewer GPUs than the one that does, nearest to the wishes, on which settings are tried too."""
LOOKS = 6
"""How often the simulator may disagree before its last word is shown as it is."""

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


def settle(asked: Asked) -> Path:
    """Choose, let the simulator look at it and at what is a step smaller, and choose again as long as it disagrees."""
    failed = _measured_to_fail(asked.base, asked.diagnosis)
    passed: Passed = {}
    for _ in range(LOOKS):
        path = _find(asked, _marked(asked.table, failed, passed), failed)
        if not asked.verify or path.chosen is None:
            return path
        key = (path.chosen.layout, path.chosen.settings)
        looked = passed.get(key) or verified(asked.case, path.chosen)
        path, refused = replace(path, chosen=looked), refused_by(looked)
        if refused is not None:
            failed[key] = refused
            passed.pop(key, None)
            continue
        smaller = _smaller_that_does(asked, path, failed)
        if smaller is None:
            return path
        passed[smaller.layout, smaller.settings] = smaller
    return path


def _smaller_that_does(asked: Asked, path: Path, failed: Failed) -> Candidate | None:
    """Of the layouts with a step less of one axis, one that the prediction refuses and the simulator does not. Where
    the queue grows without end a few hundred requests are no answer: that is left to the prediction."""
    if path.chosen is None or not isinstance(path.chosen.layout, Layout) or path.chosen is path.base:
        return None
    for axis in path.axes:
        less = lowered(path.candidates, path.chosen.grid, axis)
        if less is None or less.does or less.prediction is None or less.fault == "overload":
            continue
        key = (less.layout, less.settings)
        if key in failed:
            continue
        looked = verified(asked.case, less)
        if looked.verified is not None and all(row["met"] for row in looked.verified["outcomes"]):
            return replace(looked, fault="", reason="")
        failed[key] = refused_by(looked) or (less.fault, less.reason)
    return None


def _marked(table: Sequence[Candidate], failed: Failed, passed: Passed | None = None) -> list[Candidate]:
    """With what was refused, and why, and what the simulator lets pass against the prediction."""

    def marked(one: Candidate) -> Candidate:
        key = (one.layout, one.settings)
        if passed and key in passed:
            return passed[key]
        told = failed.get(key)
        if told is None or told[1] == one.reason:
            return one
        return replace(one, fault=one.fault or told[0], reason=f"{told[1]} {one.reason}".strip())

    return [marked(one) for one in table]


def _find(asked: Asked, table: list[Candidate], failed: Failed) -> Path:
    case, diagnosis = asked.case, asked.diagnosis
    base = next((one for one in table if one.layout == asked.base.layout), asked.base)
    limit = _limit(case, base, diagnosis)
    measured = diagnosis is not None and diagnosis.resource != NOT_MEASURED
    path = Path(case, table, base, limit, base, measured=measured, given=asked.given)
    if base.does or (measured and limit.resource == NONE):
        return path
    engine = [_remedy_marked(one, failed) for one in engine_remedies(case, base, limit)]
    done = next((remedy.candidate for remedy in engine if remedy.does), None)
    pure = None if done else smallest(case, table, limit, base, asked.given)
    chosen = done or _with_settings(asked, table, pure, failed) or pure
    pools: list[Candidate] = []
    if done is None and (limit.cause == INTERFERENCE or chosen is None):
        most = chosen.num_gpus - 1 if chosen else case.hardware.num_gpus
        pools = _marked(pool_candidates(case, most), failed)
        chosen = next((one for one in pools if one.does), chosen)
    return replace(path, chosen=chosen, engine=tuple(engine), others=tuple(other_remedies(case, base, limit)),
                   pools=tuple(pools))  # fmt: skip


def _remedy_marked(remedy: Remedy, failed: Failed) -> Remedy:
    one = remedy.candidate
    told = failed.get((one.layout, one.settings)) if one else None
    return replace(remedy, does=False, sentence=f"{remedy.sentence}, but not simulated: {told[1]}") if told else remedy


def _with_settings(
    asked: Asked, table: Sequence[Candidate], pure: Candidate | None, failed: Failed
) -> Candidate | None:
    """A layout of fewer GPUs, by the same rules of placement, that does with another setting. GPUs that serve now are
    there anyway."""
    case, have = asked.case, asked.base.num_gpus if asked.given else 0
    fewer = [one for one in table if one.outcomes and not one.does]
    if pure is not None:
        most = max(pure.num_gpus, have)
        fewer = [one for one in fewer if max(one.num_gpus, have) < most and one in allowed(case, [pure, one])]
    nearest = sorted(fewer, key=lambda one: (max(o.ratio for o in one.outcomes), simplicity(one.grid)))
    tried: list[Remedy] = []
    for one in nearest[:TRIED_WITH_SETTINGS]:
        tried += [_remedy_marked(remedy, failed) for remedy in engine_remedies(case, one, limit_of(case, one))]
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
    return {(base.layout, base.settings): (missed.metric, f"{base.layout} was measured: {missed}.")}
