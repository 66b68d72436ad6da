"""The object that a run comes down to.

Names that scripts rely on, made from rows and circumstances in one place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from labkit.lab.plan import RunPlan
from labkit.layout import AnyLayout, pools_of, read_layout
from labkit.load.report import LoadReport
from labkit.measure.breakdown import handoff_figures, step_share, summarize_tpot, summarize_ttft
from labkit.measure.metrics import Window, counted, summarize
from labkit.measure.quality import Circumstances, trusted, verdicts
from labkit.measure.records import Environment, RequestRecord, StepRecord
from labkit.measure.stages import stage_figures
from labkit.measure.statistics import Summary
from labkit.measure.steady import steady_state


class Setting(msgspec.Struct, kw_only=True):
    """Where a run took place, as the server told it; a foreign server tells its model at most."""

    model: str
    layout: str | None = None
    environment: Environment | None = None
    memory: list[dict[str, Any]] = []
    settings: dict[str, Any] = {}
    switch: dict[str, Any] | None = None
    num_foreign: int = 0
    notices: list[str] = []
    engine: dict[str, Any] | None = None
    """Of a production engine that was started for the run: name, version, command, flags, metrics."""


def setting_of(state: Mapping[str, Any], switch: dict[str, Any] | None, num_foreign: int) -> Setting:
    """From the lab server's state."""
    environment = state.get("environment")
    return Setting(
        model=state["model"],
        layout=state["layout"],
        environment=msgspec.convert(environment, Environment) if environment else None,
        memory=list(state.get("memory", [])),
        settings=dict(state.get("settings", {})),
        switch=switch,
        num_foreign=num_foreign,
    )


def build_summary(
    plan: RunPlan,
    where: Setting,
    records: Sequence[RequestRecord],
    steps: Sequence[StepRecord],
    report: LoadReport | None,
    *,
    run_id: str,
    stopped_early: bool = False,
) -> Summary:
    """The keys of `labkit run --json`, in the order in which one reads them."""
    window = Window(report.window_start_ns, report.window_end_ns) if report else Window.of(records)
    figures = summarize(records, plan.objective, window)
    quality = verdicts(records, window, _circumstances(plan, where, report, stopped_early))
    figures["goodput"]["trusted"] = trusted(quality)
    layout = read_layout(where.layout) if where.layout else None
    environment, busy = where.environment, _busy(plan, records, window)
    return {
        "run_id": run_id,
        "layout": where.layout,
        "model": where.model,
        "backend": environment.backend if environment else None,
        "num_ranks": layout.world_size if layout else None,
        **figures,
        **summarize_ttft(counted(records, window)),
        **summarize_tpot(counted(records, window)),
        "steady": steady_state(records, window),
        "step_share": step_share(steps, busy, range(layout.world_size) if layout else None),
        "pipeline": _pipeline(steps, busy, layout) if layout else None,
        "handoff": handoff_figures(counted(records, window)),
        "memory_bytes": _memory(where.memory, layout),
        "quality": quality,
        **_load(plan, report),
        "settings": where.settings,
        "switch": where.switch,
        "environment": msgspec.to_builtins(environment) if environment else None,
        "engine": where.engine,
    }


def _busy(plan: RunPlan, records: Sequence[RequestRecord], window: Window) -> Window:
    """When the ranks were under the load: a closed loop keeps them there until its last answer has come."""
    if not plan.concurrency:
        return window
    ends = [record.end_ns for record in counted(records, window) if record.status == "completed"]
    return Window(window.start_ns, max([window.end_ns, *ends]))


def _pipeline(steps: Sequence[StepRecord], window: Window, layout: AnyLayout) -> Summary | None:
    """Of the layout, or of the first of its pools that has stages."""
    for pool in pools_of(layout):
        own = [step for step in steps if step.ranks and step.ranks[0] in pool.ranks]
        figures = stage_figures(own, window, pool.layout, pool.first_rank)
        if figures is not None:
            return figures
    return None


def _circumstances(
    plan: RunPlan, where: Setting, report: LoadReport | None, stopped_early: bool
) -> Circumstances:
    notes = list(report.notes) if report else []
    return Circumstances(
        objective=plan.objective,
        environment=where.environment,
        sharing_expected=plan.shares_prefixes,
        num_foreign=where.num_foreign,
        stopped_early=stopped_early,
        notices=tuple(where.notices + notes),
    )


def _memory(memory: Sequence[Mapping[str, Any]], layout: AnyLayout | None) -> list[dict[str, Any]]:
    """Per rank of the layout; the pool's other ranks hold nothing of it."""
    size = layout.world_size if layout else 0
    return [dict(rank) for rank in memory if rank["rank"] < size]


def _load(plan: RunPlan, report: LoadReport | None) -> Summary:
    return {
        "workload": plan.workload_name,
        "seed": plan.seed,
        "rate": report.asked_rate or None if report else plan.rate,
        "offered_rate": report.offered_rate if report else None,
        "concurrency": plan.concurrency or None,
        "burstiness": plan.burstiness,
        "warmup_s": plan.effective_warmup_s,
        "length_scale": plan.length_scale,
    }
