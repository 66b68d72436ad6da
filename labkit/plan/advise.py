"""From a limit to a layout: the smallest change that addresses what is short, why, how sure that is, and how to run it.

All layouts of the GPUs are held against the traffic (`candidates`), the limit of what serves now is named (measured by
a run, or predicted of the smallest layout that holds the model), settings of the engine are tried before any axis, and
of the layouts that meet every wish the smallest is taken (`choose`). The simulator looks at it once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from labkit.layout import AnyLayout, Deployment, Layout
from labkit.layout.choices import simplicity
from labkit.model.shapes import ModelSpec
from labkit.plan.candidates import Candidate, all_candidates, evaluate
from labkit.plan.case import Case
from labkit.plan.checks import Check, all_checks
from labkit.plan.choose import nearest_miss
from labkit.plan.correction import Correction, corrected
from labkit.plan.demand import Demand
from labkit.plan.diagnose import Diagnosis
from labkit.plan.front import front_row, pareto_front
from labkit.plan.hardware import Hardware
from labkit.plan.limits import Limit, limit_of
from labkit.plan.next_runs import next_runs
from labkit.plan.objective import PlanObjective
from labkit.plan.rank_places import RankPlaces, often_on_slow, place_ranks
from labkit.plan.reasons import Infeasible, infeasible, why_not
from labkit.plan.remedies import other_remedies, settings_changed
from labkit.plan.settle import Asked, settle
from labkit.plan.strict_json import finite
from labkit.plan.walk import walk
from labkit.plan.walk_path import NO, Path, Question
from labkit.plan.walk_questions import job
from labkit.plan.work import EngineSettings
from labkit.said import say

MOST_GPUS = 128
"""Layouts grow faster than GPUs do, and each is counted: 64 take ten seconds of a core."""


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
    correction: str = ""
    """Why `case` differs from what was asked for: a measurement that the prediction missed. Empty: it does not."""

    def to_json(self) -> dict[str, Any]:
        """JSON-ready, with the names that scripts rely on."""
        q = self.case.objective.percentile
        return finite({
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
        })  # fmt: skip

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
    current: AnyLayout | None = None,
    diagnosis: Diagnosis | None = None,
    expert_load: Sequence[float] = (),
    verify: bool = True,
    asked: str = "",
) -> Advice:
    """What to serve `spec` with. current: what serves now, be it two pools; diagnosis: of a run with it; expert_load:
    tokens that each expert was asked for, as measured; verify: let the simulator look at the outcome; asked: how the
    workload was named, for the load test. Raises ValueError with a sentence.
    """
    if objective.asks_nothing:
        raise ValueError("Nothing is asked: give --ttft-p95-ms, --tpot-p95-ms, --answer-tokens-per-s or "
                         "--server-tokens-per-s.")  # fmt: skip
    if hardware.num_gpus > MOST_GPUS:
        raise ValueError(
            f"{hardware.num_gpus:,} GPUs: a plan looks at every layout of up to {MOST_GPUS}. Plan for a share of them "
            "and of the traffic, and repeat what is chosen; one layout of more GPUs takes `labkit simulate`."
        )
    price = hardware.device.price_per_hour if price is None else price
    asked_for = Case(spec, hardware, workload, objective, settings or EngineSettings(), engine, price)
    if isinstance(current, Deployment):
        from labkit.plan.advise_pools import advise_with_pools

        return advise_with_pools(asked_for, current, lambda: advise(
            spec, hardware, workload, objective, settings, engine=engine, price=price, verify=verify, asked=asked,
        ), verify=verify, asked=asked)  # fmt: skip
    correction = corrected(asked_for, current, diagnosis) if current is not None else Correction(asked_for)
    case = correction.case
    table = all_candidates(case)
    base = _base(case, table, current)
    if base is None:
        return _nothing_fits(case, table, diagnosis)
    path = settle(Asked(case, table, base, current is not None, diagnosis, verify))
    others = () if path.base.does else tuple(other_remedies(case, path.base, path.limit))
    told = _told(replace(path, correction=correction.sentence, others=others), diagnosis, expert_load, asked)
    return replace(told, correction=correction.sentence)


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
    question = Question("fit", say("Does the model fit these GPUs at all?"), NO, largest.reason, {}, "")
    return Advice(case, None, "none", (question,), (), tuple(table), (), limit, None, diagnosis,
                  infeasible(case, table), (), next_runs(case, None, (), diagnosis))  # fmt: skip


def commands_of(case: Case, chosen: Candidate, asked: str) -> list[dict[str, Any]]:
    """An entry an engine, each with its commands or why it has none, and the load test of the prediction."""
    from labkit.plan.deploy import every_engine

    return every_engine(
        chosen.layout, case.spec, chosen.settings, workload=case.demand, objective=case.objective,
        gpus_per_node=case.hardware.num_gpus // case.hardware.num_nodes, asked=asked,
    )  # fmt: skip
