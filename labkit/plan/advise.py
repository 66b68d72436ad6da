"""From a limit to a layout: the smallest change that addresses what is short, why, how sure that is, and how to run it.

All layouts of the GPUs are held against the traffic (`candidates`), the limit of what serves now is named (measured by
a run, or predicted of the smallest layout that holds the model), settings of the engine are tried before any axis, and
of the layouts that meet every wish the smallest is taken (`choose`). The simulator looks at it once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from labkit.layout import AnyLayout, Layout
from labkit.layout.choices import simplicity
from labkit.model.shapes import ModelSpec
from labkit.plan.candidates import Candidate, all_candidates, evaluate
from labkit.plan.case import Case
from labkit.plan.checks import Check, all_checks
from labkit.plan.choose import allowed, nearest_miss, smallest
from labkit.plan.correction import Correction, corrected
from labkit.plan.demand import Demand
from labkit.plan.diagnose import Diagnosis
from labkit.plan.findings import NONE, NOT_MEASURED
from labkit.plan.front import front_row, pareto_front
from labkit.plan.hardware import Hardware
from labkit.plan.limits import INTERFERENCE, Limit, limit_of
from labkit.plan.next_runs import next_runs
from labkit.plan.objective import PlanObjective
from labkit.plan.pools import pool_candidates
from labkit.plan.rank_places import RankPlaces, often_on_slow, place_ranks
from labkit.plan.reasons import Infeasible, infeasible, why_not
from labkit.plan.remedies import Remedy, engine_remedies, other_remedies, settings_changed
from labkit.plan.walk import Path, Question, job, walk
from labkit.plan.work import EngineSettings

TRIED_WITH_SETTINGS = 3
"""Layouts of fewer GPUs than the one that does, nearest to the wishes, on which settings are tried too."""
LOOKS = 5
"""How often the simulator may say no before its last word is shown as it is."""


@dataclass(frozen=True)
class Advice:
    """`chosen` is None where nothing on these GPUs meets every wish; then `infeasible` says which cannot be met."""

    case: Case
    chosen: Candidate | None
    kind: str
    """as it is, settings, layout, or none."""
    walk: tuple[Question, ...]
    checks: tuple[Check, ...]
    layouts: tuple[Candidate, ...]
    front: tuple[Candidate, ...]
    limit: Limit
    places: RankPlaces | None = None
    diagnosis: Diagnosis | None = None
    infeasible: Infeasible | None = None
    commands: tuple[dict[str, Any], ...] = ()
    next: tuple[str, ...] = ()
    jobs: dict[str, str] = field(default_factory=dict)
    """Axis → what would be missing without it."""

    def to_json(self) -> dict[str, Any]:
        """JSON-ready, with the names that scripts rely on."""
        q = self.case.objective.percentile
        return {
            "chosen": self._chosen(),
            "walk": [question.to_dict() for question in self.walk],
            "checks": [check.to_dict() for check in self.checks],
            "layouts": [self._row(one) for one in self.layouts],
            "front": [front_row(one, q) for one in self.front],
            "commands": list(self.commands),
            "diagnosis": self.diagnosis.to_dict() if self.diagnosis else None,
            "limit": self.limit.to_dict(),
            "placement": self.places.to_dict() if self.places else None,
            "infeasible": self.infeasible.to_dict() if self.infeasible else None,
            "next": list(self.next),
            "model": self.case.spec.name,
            "gpus": self.case.hardware.name,
            "engine": self.case.engine,
            "workload": self.case.demand.to_dict(),
            "objective": self.case.objective.to_dict(),
            "price": self.case.price,
        }

    def _row(self, one: Candidate) -> dict[str, Any]:
        chosen = self.chosen is not None and one.layout == self.chosen.layout
        return one.to_dict() | {"chosen": chosen, "reason": one.reason if chosen else why_not(one, self.chosen)}

    def _chosen(self) -> dict[str, Any] | None:
        if self.chosen is None:
            return None
        changed = settings_changed(self.case.settings, self.chosen.settings)
        return self.chosen.to_dict() | {"kind": self.kind, "settings": changed, "jobs": self.jobs}


def advise(
    spec: ModelSpec,
    hardware: Hardware,
    workload: Demand,
    objective: PlanObjective,
    settings: EngineSettings | None = None,
    *,
    engine: str = "vllm",
    price: float | None = None,
    current: Layout | None = None,
    diagnosis: Diagnosis | None = None,
    expert_load: Sequence[float] = (),
    verify: bool = True,
    asked: str = "",
) -> Advice:
    """What to serve `spec` with. current: the layout that serves now; diagnosis: of a run with it; expert_load: tokens
    that each expert was asked for, as measured; verify: let the simulator look at the outcome; asked: how the workload
    was named, for the load test. Raises ValueError with a sentence.
    """
    if objective.asks_nothing:
        raise ValueError("Nothing is asked: give --ttft-p95-ms, --tpot-p95-ms, --answer-tokens-per-s or "
                         "--server-tokens-per-s.")  # fmt: skip
    price = hardware.device.price_per_hour if price is None else price
    asked_for = Case(spec, hardware, workload, objective, settings or EngineSettings(), engine, price)
    correction = corrected(asked_for, current, diagnosis) if current is not None else Correction(asked_for)
    case = correction.case
    table = all_candidates(case)
    base = _base(case, table, current)
    if base is None:
        return _nothing_fits(case, table, diagnosis)
    path = _settle(_Asked(case, table, base, current is not None, diagnosis, verify))
    return _told(replace(path, correction=correction.sentence), diagnosis, expert_load, asked)


def _base(case: Case, table: Sequence[Candidate], current: Layout | None) -> Candidate | None:
    """What serves now; else the smallest that holds the model: tensor parallelism inside the fast group first, stages
    only where that is not enough."""
    if current is not None:
        found = evaluate(case, current)
        if not found.fits:
            raise ValueError(f"{current} is said to serve now, and cannot by the arithmetic: {found.reason}")
        return found
    fitting = [one for one in table if one.fits and one.grid.dp == one.grid.pcp == one.grid.dcp == 1]
    return min(fitting or [one for one in table if one.fits], default=None, key=lambda one: (
        often_on_slow(one.grid, case.spec, case.hardware), one.grid.pp, one.grid.ep > 1, one.num_gpus,
        simplicity(one.grid),
    ))  # fmt: skip


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


# ---- finding it

Failed = dict[tuple[AnyLayout, EngineSettings], tuple[str, str]]
"""What a measurement or a simulation refused: (fault, reason)."""


@dataclass(frozen=True)
class _Asked:
    case: Case
    table: list[Candidate]
    base: Candidate
    given: bool
    diagnosis: Diagnosis | None
    verify: bool


def _settle(asked: _Asked) -> Path:
    """Choose, let the simulator look, and choose again without what it refuses."""
    failed = _measured_to_fail(asked.base, asked.diagnosis)
    for _ in range(LOOKS):
        path = _find(asked, _marked(asked.table, failed), failed)
        if not asked.verify or path.chosen is None:
            return path
        from labkit.plan.verification import refused_by, verified

        looked = verified(asked.case, path.chosen)
        path = replace(path, chosen=looked)
        refused = refused_by(looked)
        if refused is None:
            return path
        failed[looked.layout, looked.settings] = refused
    return path


def _marked(table: Sequence[Candidate], failed: Failed) -> list[Candidate]:
    """With what was refused, and why."""

    def marked(one: Candidate) -> Candidate:
        told = failed.get((one.layout, one.settings))
        if told is None:
            return one
        return replace(one, fault=one.fault or told[0], reason=f"{told[1]} {one.reason}".strip())

    return [marked(one) for one in table]


def _find(asked: _Asked, table: list[Candidate], failed: Failed) -> Path:
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
    chosen = done or _with_settings(case, table, pure, failed) or pure
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
    case: Case, table: Sequence[Candidate], pure: Candidate | None, failed: Failed
) -> Candidate | None:
    """A layout of fewer GPUs, by the same rules of placement, that does with another setting."""
    fewer = [one for one in table if one.outcomes and not one.does and (pure is None or one.num_gpus < pure.num_gpus)]
    fewer = [one for one in fewer if one in (fewer if pure is None else allowed(case, [pure, one]))]
    nearest = sorted(fewer, key=lambda one: (max(o.ratio for o in one.outcomes), simplicity(one.grid)))
    tried: list[Remedy] = []
    for one in nearest[:TRIED_WITH_SETTINGS]:
        tried += [_remedy_marked(remedy, failed) for remedy in engine_remedies(case, one, limit_of(case, one))]
    doing = [remedy.candidate for remedy in tried if remedy.does and remedy.candidate]
    return min(doing, key=lambda one: simplicity(one.grid), default=None)


# ---- telling it


def _told(
    path: Path, diagnosis: Diagnosis | None, expert_load: Sequence[float], asked: str
) -> Advice:  # fmt: skip
    case, chosen = path.case, path.chosen
    q = case.objective.percentile
    everything = [*path.candidates, *path.pools]
    front = tuple(pareto_front([one for one in everything if one.prediction], q))
    if chosen is None:
        near = nearest_miss(path.candidates)
        return Advice(case, None, "none", tuple(walk(path)), (), tuple(everything), front, path.limit, None, diagnosis,
                      infeasible(case, everything), (), next_runs(case, near, (), diagnosis))  # fmt: skip
    places = place_ranks(chosen.layout, case.spec, case.hardware, case.demand.prompt_tokens, case.demand.tokens_each)
    checks = tuple(all_checks(case, chosen, places, expert_load))
    jobs = {axis: job(path, chosen, axis)[0] for axis in path.axes}
    kind = "layout" if chosen.layout != path.base.layout else "settings"
    kind = "as it is" if chosen.layout == path.base.layout and chosen.settings == path.base.settings else kind
    return Advice(
        case, chosen, kind, tuple(walk(path)), checks, tuple(_with_chosen(everything, chosen)), front, path.limit,
        places, diagnosis, None, tuple(commands_of(case, chosen, asked)), next_runs(case, chosen, checks, diagnosis),
        jobs,
    )  # fmt: skip


def _with_chosen(everything: list[Candidate], chosen: Candidate) -> list[Candidate]:
    """The table with the chosen one as it was chosen: with its settings, and looked at by the simulator."""
    return [chosen if one.layout == chosen.layout else one for one in everything]


def _nothing_fits(case: Case, table: list[Candidate], diagnosis: Diagnosis | None) -> Advice:
    legal = [one for one in table if one.legal]
    largest = max(legal, key=lambda one: (one.num_gpus, one.grid.dp == 1, one.memory.kv_blocks if one.memory else 0))
    limit = limit_of(case, largest)
    question = Question("fit", "Does the model fit these GPUs at all?", "no", largest.reason, {}, "")
    return Advice(case, None, "none", (question,), (), tuple(table), (), limit, None, diagnosis,
                  infeasible(case, table), (), next_runs(case, None, (), diagnosis))  # fmt: skip


def commands_of(case: Case, chosen: Candidate, asked: str) -> list[dict[str, Any]]:
    """An entry an engine, each with its commands or why it has none, and the load test of the prediction."""
    from labkit.plan.deploy import every_engine

    return every_engine(
        chosen.layout, case.spec, chosen.settings, workload=case.demand, objective=case.objective,
        gpus_per_node=case.hardware.num_gpus // case.hardware.num_nodes, asked=asked,
    )  # fmt: skip
