"""What the planner says, as tables of a lesson: a diagnosis and its evidence, the walk, the checks, why not the others.

Everything here is computed by `labkit.plan`; a simulation is the engine's own scheduler on a virtual clock, fed with
the steps' predicted cost, so that it stands for a machine that is not here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from labkit.lab import Run
from labkit.layout import Layout
from labkit.plan.advise import Advice
from labkit.plan.candidates import Candidate, evaluate
from labkit.plan.case import cost_of_step, decode_work, prefill_work
from labkit.plan.diagnose import Diagnosis
from labkit.plan.objective import Outcome, PlanObjective, judge, spoken_ms
from labkit.plan.reasons import grouped
from labkit.plan.simulate import SimResult
from labkit.plan.verification import simulated, steady_percentiles, tokens_per_s
from labkit.teach.html import Table
from labkit.teach.lesson import Lesson
from labkit.teach.sidebyside import Row

_FEW = 3
"""Examples of a group of layouts that were not taken."""


def beside(lesson: Lesson, title: str, *rows: Row, column: str = "planned") -> Table:
    """`side_by_side` of what was not measured but planned or counted: the column says so."""
    table = lesson.side_by_side(title, *rows)
    table.columns[table.columns.index("measured")] = column
    return table


# ---- what a run is short of


def evidence_table(found: Diagnosis) -> Table:
    """Every resource: short, enough or not measured, by which evidence, and what would measure it."""
    rows = [[one.resource, one.state, one.sentence, one.measure] for one in found.findings]
    columns = ["resource", "", "evidence", "would be measured by"]
    return Table("Diagnosis: what this run is short of", columns, rows, [found.sentence])


def outcomes_of(run: Run, objective: PlanObjective) -> list[Outcome]:
    """Each wish held against a measured run."""
    throughput = run.summary.get("throughput") or {}
    return judge(objective, run.summary["ttft_ms"], run.summary["tpot_ms"], throughput.get("output_tokens_per_s"))


def outcomes_table(runs: Mapping[str, Run], objective: PlanObjective) -> Table:
    """Measured runs against the wishes, a row a run."""
    rows = []
    for label, run in runs.items():
        found = outcomes_of(run, objective)
        missed = [outcome.name for outcome in found if not outcome.met]
        counts = run.summary["requests"]
        rows.append([label, *map(_told, found), ", ".join(missed) or "none", str(counts["completed"])])
    names = [objective.name(metric) for metric in objective.limits()]
    return Table(f"Measured here; asked: {objective}", ["", *names, "missed", "n"], rows)


def _told(outcome: Outcome) -> str:
    value = f"{outcome.value:,.0f} tokens/s" if outcome.is_rate else spoken_ms(outcome.value)
    return f"{value}, {outcome.ratio:.2g} × its limit"


# ---- what the planner makes of it


def walk_table(advice: Advice) -> Table:
    """The questions that were asked, with their answers; those that nothing was left for are named below."""
    asked = [question for question in advice.walk if question.answer != "not asked"]
    rows = [[question.question, question.answer, question.sentence, name_of(question.layout)] for question in asked]
    left = [question.code.upper() for question in advice.walk if question.answer == "not asked"]
    remarks = [f"Not asked, because every wish is met before: {', '.join(left)}."] if left else []
    if advice.infeasible is not None:
        remarks.append(advice.infeasible.sentence)
    case = advice.case
    title = f"{case.spec.name} on {case.hardware.name}, {case.demand.name} at {case.demand.load}: the walk"
    return Table(title, ["question", "", "because", "stands at"], rows, remarks)


def name_of(slug: str) -> str:
    """As it is printed: TP2 for tp2; pools and nothing at all as they are spelled."""
    return str(Layout.parse(slug)) if slug not in ("", "none") and ":" not in slug else slug


def ends_in(advice: Advice) -> str:
    """The chosen layout's short name, or none."""
    return advice.chosen.layout.slug if advice.chosen else "none"


def checks_table(advice: Advice) -> Table:
    """What must be looked at before it is deployed, axis by axis."""
    rows = [[check.axis, check.name, check.status, check.sentence, check.measure] for check in advice.checks]
    columns = ["axis", "check", "", "figures", "would be measured by"]
    return Table(f"Checks of {name_of(ends_in(advice))}", columns, rows)


def others_table(advice: Advice) -> Table:
    """Why each other layout was not taken, in groups of one reason."""
    rows = []
    for _, told, members in grouped(advice.layouts, advice.chosen):
        first = ", ".join(str(one.layout) for one in members[:_FEW])
        more = f" and {len(members) - _FEW} more" if len(members) > _FEW else ""
        rows.append([str(len(members)), told, first + more, members[0].reason])
    return Table("Why not the others", ["layouts", "", "such as", "the first one's reason"], rows)


# ---- simulated, before and after


def candidate_of(advice: Advice, slug: str, alike: bool = False) -> Candidate:
    """The chosen layout with its settings; another with those that serve now, or (`alike`) with the chosen one's.

    Raises ValueError with the reason when it cannot be served.
    """
    chosen = advice.chosen
    if chosen is not None and chosen.layout.slug == slug:
        return chosen
    settings = chosen.settings if alike and chosen is not None else None
    found = evaluate(advice.case, Layout.parse(slug), settings)
    if found.memory is None or not found.memory.fits:
        raise ValueError(found.reason)
    return found


def simulate_layouts(advice: Advice, *slugs: str, alike: bool = False) -> dict[str, SimResult]:
    """The advice's traffic on each layout: name → what the engine's scheduler makes of it on a virtual clock."""
    found = [candidate_of(advice, slug, alike) for slug in dict.fromkeys(slugs) if slug != "none"]
    return {str(one.layout): simulated(advice.case, one) for one in found}


def simulated_outcomes(advice: Advice, result: SimResult) -> list[Outcome]:
    """The wishes held against a simulation, those of its requests left out that came while the server filled."""
    steady = steady_percentiles(result)
    return judge(advice.case.objective, steady["ttft_ms"], steady["tpot_ms"], tokens_per_s(result))


def worst_ratio(outcomes: Sequence[Outcome]) -> float:
    """How many times its limit the wish is that is missed most (or met least)."""
    return max(outcome.ratio for outcome in outcomes)


def predictions_table(advice: Advice, results: Mapping[str, SimResult]) -> Table:
    """The closed form with its known error, beside the simulation: two ways to one figure, neither of them measured."""
    q = advice.case.objective.percentile
    rows = []
    for label, result in results.items():
        closed = candidate_of(advice, Layout.parse(label.lower().replace("×", "x")).slug).prediction
        assert closed is not None
        steady = steady_percentiles(result)
        row = [label]
        for metric, band in (("ttft_ms", closed.band_ttft), ("tpot_ms", closed.band_tpot)):
            value = getattr(closed, metric)[q]
            told = "grows without end" if value == float("inf") else f"{spoken_ms(value)} ± {band:.0%}"
            row += [told, spoken_ms(steady[metric][q])]
        rows.append([*row, f"{result.kv_peak:.0%}", str(result.num_preemptions), str(int(result.done.sum()))])
    columns = ["predicted", f"TTFT {q}, closed form", "simulated", f"TPOT {q}, closed form", "simulated", "KV at most"]
    return Table(f"Before and after; asked: {advice.case.objective}", [*columns, "preemptions", "requests"], rows,
                 [f"Step cost: {source_of(advice)}."])  # fmt: skip


def source_of(advice: Advice) -> str:
    """By what the advice predicts, in words."""
    known = [one.prediction for one in advice.layouts if one.prediction]
    return known[0].source if known else "nothing fits, so nothing was predicted"


def badge_of(advice: Advice) -> str:
    """For a figure of simulations."""
    return f"{advice.case.spec.name} on {advice.case.hardware.name}, simulated; {source_of(advice)}"


def step_parts(advice: Advice, slugs: Sequence[str], *, decodes: int, prompt: int) -> dict[str, dict[str, float]]:
    """Label → part → predicted seconds: a decode step of so many answers, and a prompt's step, for each layout."""
    found = {}
    context = advice.case.demand.prompt_tokens + advice.case.demand.output_tokens // 2
    for name, work in (
        (f"decode of {decodes}", decode_work(decodes, context)),
        (f"prompt of {prompt:,}", prefill_work(prompt)),
    ):
        for slug in slugs:
            layout = Layout.parse(slug)
            found[f"{name}, {layout}"] = cost_of_step(advice.case, layout).parts(work)
    return found
