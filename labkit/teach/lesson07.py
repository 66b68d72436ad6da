"""Lesson 07: from a limit to a layout. Five situations; what each is short of, and the smallest change that helps.

What this machine's cores can show is measured, on layouts of the lab's model; the rest is planned and simulated for
GPUs that are not here. The exercises are the two rules of the walk: queue before work, and no axis without a job.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from labkit.lab import Run
from labkit.layout import Layout
from labkit.load.lengths import Lengths
from labkit.load.workload import Part, Workload
from labkit.model.spec import load_spec
from labkit.plan.advise import Advice
from labkit.plan.diagnose import Diagnosis, diagnose
from labkit.plan.hardware import load_hardware
from labkit.plan.memory import MemoryPlan, memory_plan
from labkit.plan.objective import PlanObjective
from labkit.plan.simulate import SimResult
from labkit.plan.situations import SITUATIONS, Situation
from labkit.plan.work import EngineSettings
from labkit.teach.decide_exercises import BY_CODE, check_short_of, check_smallest, short_of, smallest
from labkit.teach.html import Table
from labkit.teach.lesson import Lesson
from labkit.teach.lesson01 import budget_for
from labkit.teach.planned import ends_in, outcomes_of, simulate_layouts, simulated_outcomes, worst_ratio
from labkit.teach.reference import MIB, ReferenceCase

__all__ = ["budget_for", "check_short_of", "check_smallest", "short_of", "smallest"]

CHATS = Workload(
    name="short-chats",
    title="Chats of nearly one length",
    parts=(
        Part(
            prompt_tokens=Lengths("uniform", min_tokens=60, max_tokens=100),
            output_tokens=Lengths("uniform", min_tokens=16, max_tokens=32),
        ),
    ),
)
"""Alike, so that few of them show what a limit does."""
PATIENCE = {"ttft": 4.0, "tpot": 2.5}
"""What is asked here, over what one visitor gets: the wish means the same on a slow machine and on a fast one."""
FASTER = 1.1
"""One answer's tokens a second, over what it gets now."""


# ---- which layouts have cores here


@dataclass(frozen=True)
class Here:
    """What serves on this machine, a second replica of it, and twice the ranks for every layer."""

    now: str
    twice: str
    wider: str
    settings: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    def __repr__(self) -> str:
        return self.note


def here(lesson: Lesson) -> Here:
    """The reference case's layouts where every rank has a core or a GPU; else one rank for two, and budget for it."""
    state = lesson.lab.state()
    gpus = state["environment"]["backend"] == "nccl"
    if gpus or state["num_cores"] >= 4 * state["threads_per_rank"]:
        return Here("tp2", "dp2xtp2", "tp4", {}, "Every one of four ranks has a core here: measured as in the case.")
    roomy = {"memory_per_rank": 3 * lesson.case.budget_bytes}
    note = (
        "This machine has cores for two ranks that work. So that times mean something, what is measured here has one "
        "rank where the case has two, and a budget that lets it: TP1 stands for TP2, DP2 for DP2×TP2, TP2 for TP4."
    )
    return Here("tp1", "dp2", "tp2", roomy, note)


def wishes(quiet: Run, percentile: str = "p50") -> PlanObjective:
    """TTFT and TPOT, as multiples of what one visitor alone gets."""
    ttft, tpot = (quiet.summary[f"{name}_ms"]["p50"] * times for name, times in PATIENCE.items())
    return PlanObjective(ttft_ms=ttft, tpot_ms=tpot, percentile=percentile)


def faster(now: Run) -> PlanObjective:
    """One answer's tokens a second, a tenth above what it gets."""
    return PlanObjective(answer_tokens_per_s=FASTER * 1e3 / now.summary["tpot_ms"]["p50"])


def diagnosed(run: Run, objective: PlanObjective, quiet: Run | None = None) -> Diagnosis:
    """`labkit.plan.diagnose` of a run, with its requests and steps; quiet: the same server, one request at a time."""
    return diagnose(run.summary, objective, run=run, low_load=quiet.summary if quiet else None)


def kv_tokens(case: ReferenceCase, run: Run) -> int:
    """Tokens of KV that a replica of the run's layout had room for, by the memory that its first rank reported."""
    return int(run.summary["memory_bytes"][0]["kv"]) // case.kv_bytes_per_token(run.summary["layout"])


def queue_share(run: Run) -> float:
    """Of the mean TTFT."""
    parts = {name: value or 0.0 for name, value in run.summary["ttft_parts_ms"].items()}
    return parts["queue"] / sum(parts.values())


def most_at_once(run: Run) -> int:
    """Requests that a step carried at most."""
    return max(step.num_prefill_seqs + step.num_decode_seqs for step in run.step_records)


def counts_table(case: ReferenceCase, runs: Mapping[str, Run]) -> Table:
    """Room for KV, and what it let in."""
    rows = []
    for label, run in runs.items():
        waits = [(r.server.first_start_ns - r.server.received_ns) / 1e6 for r in run.records if r.server]
        rows.append([label, f"{kv_tokens(case, run):,}", str(most_at_once(run)), f"{statistics.median(waits):,.0f} ms",
                     f"{queue_share(run):.0%}"])  # fmt: skip
    columns = ["", "KV tokens of a replica", "requests in a step at most", "to the first step, p50", "queue, of TTFT"]
    return Table("Room, and what waited for it", columns, rows)


# ---- the case, here and on GPUs that are not here


def own_memory(case: ReferenceCase, layout: str, budget: int) -> MemoryPlan:
    """Planned for labkit's engine, whose budget is of weights and KV."""
    settings = case.settings()
    planned = EngineSettings(
        policy="labkit", max_num_batched_tokens=settings["max_num_batched_tokens"],
        max_num_seqs=settings["max_num_seqs"], block_size=settings["block_size"],
    )  # fmt: skip
    return memory_plan(Layout.parse(layout), case.spec, budget, planned)


def case_table(case: ReferenceCase, num_requests: int = 64) -> Table:
    """The same case at two scales: one rank is too little, two hold the model, four hold far more KV."""
    far, rows = BY_CODE["queue"], []
    hardware = load_hardware(far.gpus)
    for slug in ("tp1", "tp2", "tp4"):
        near = own_memory(case, slug, case.budget_bytes)
        rows.append(_held(case.model, f"{case.budget_bytes / MIB:.0f} MiB", near, MIB, "MiB", num_requests, 168))
    for slug in ("tp1", "tp2", "tp4"):
        plan = memory_plan(Layout.parse(slug), load_spec(far.model), hardware.device.memory_bytes, EngineSettings())
        memory = f"{hardware.device.memory_bytes / 1e9:.0f} GB ({hardware.device.title})"
        rows.append(_held(far.model, memory, plan, 1e9, "GB", num_requests, far.demand.tokens_each))
    columns = ["model", "a rank has", "layout", "weights", "KV tokens", f"{num_requests} chats at once"]
    remarks = ["Predicted, from shapes and settings. Chats of 168 tokens here and of 1,280 there, answer and all."]
    return Table("The case, here and on four GPUs", columns, rows, remarks)


def _held(
    model: str, memory: str, plan: MemoryPlan, unit: float, name: str, num_requests: int, tokens_each: int
) -> list[str]:
    weights = f"{max(rank.weight_bytes for rank in plan.ranks) / unit:.1f} {name}"
    verdict = plan.verdict(num_requests, tokens_each)
    told = verdict.answer if not verdict.most else f"{verdict.answer} (KV holds {verdict.most})"
    return [model, memory, str(plan.layout), weights, f"{plan.kv_tokens:,}", told]


def situations_table(situations: Sequence[Situation] = SITUATIONS) -> Table:
    """What is asked in each, and what serves."""
    rows = [
        [one.title, one.model, one.gpus, f"{one.demand.prompt_tokens:,} in, {one.demand.output_tokens:,} out, "
         f"{one.demand.load}", str(one.objective), str(Layout.parse(one.now)) if one.now else "nothing yet"]
        for one in situations
    ]  # fmt: skip
    return Table("Five situations", ["", "model", "GPUs", "traffic", "asked", "serves now"], rows)


@lru_cache(maxsize=16)
def plan(code: str) -> Advice:
    """What `labkit plan` answers for a situation."""
    return BY_CODE[code].advise()


def asked_for(code: str, **wishes: Any) -> Advice:
    """The same situation with other wishes (of `PlanObjective`). Raises ValueError when nothing is asked."""
    return replace(BY_CODE[code], objective=PlanObjective(**wishes)).advise()


# ---- before and after


def ratios(objective: PlanObjective, before: Run, after: Run) -> tuple[float, float]:
    """How many times its limit the worst wish was."""
    return worst_ratio(outcomes_of(before, objective)), worst_ratio(outcomes_of(after, objective))


def simulated_ratios(
    plans: Mapping[str, Advice], results: Mapping[str, Mapping[str, SimResult] | None]
) -> dict[str, tuple[float, float]]:
    """The same of simulations: the first layout of each, and the last. Simulated here where it was not before."""
    found = {}
    for name, advice in plans.items():
        told = results[name] or simulate_layouts(advice, "tp2", ends_in(advice))
        before, *_, after = told.values()
        found[name] = tuple(worst_ratio(simulated_outcomes(advice, one)) for one in (before, after))
    return found  # type: ignore[return-value]  # two of them


def place(lesson: Lesson) -> str:
    """For a badge."""
    where = lesson.lab.state()["environment"]
    return f"{where['host']}, {where['backend']}, {lesson.lab.state()['num_cores']} cores"
