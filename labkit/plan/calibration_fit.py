"""One layout's measured steps and requests become its costs: each stage's parts, what crosses, the client's share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labkit.layout import Layout
from labkit.measure.records import RequestRecord, StepRecord
from labkit.plan.calibration import LayoutFit, Measure
from labkit.plan.fitted_cost import PARTS, FittedCost, features
from labkit.plan.step_fit import Fit, fit_steps
from labkit.plan.step_samples import Sample, pipeline_times, samples_of

_OF_A_SECOND = 5
"""Steps that a second must have for its mean to count."""
LEAST_COMPANY = 0.02
"""Where others were at work beside a step for less of its time than this, on average, company was not measured."""


def fit_layout(
    layout: Layout, steps: Sequence[StepRecord], lone: Sequence[RequestRecord] = ()
) -> LayoutFit:
    """lone: requests that had the server to themselves, for what a client sees beside the steps.

    Raises ValueError when there are too few steps to fit.
    """
    samples = samples_of(steps, layout)
    fits = [_fit_stage(samples, stage) for stage in range(layout.pp)]
    hops, turnaround = pipeline_times(steps, layout)
    stages = tuple((_measures(fit, 0), _measures(fit, len(PARTS))) for fit in fits)
    return LayoutFit(
        layout=layout.slug,
        stages=stages,
        spread=spread_of(samples, LayoutFit(layout.slug, stages).cost()),
        pipeline={"hops": Measure(hops, "s"), "turnaround": Measure(turnaround, "s")} if layout.pp > 1 else {},
        crossing=_fit_crossing(samples, layout),
        client=client_measures(steps, lone) if lone else {},
        num_steps=len(samples),
        num_dropped=max(fit.num_dropped for fit in fits),
        error=float(np.mean([fit.error for fit in fits])),
        bias=float(np.mean([fit.bias for fit in fits])),
        num_collectives=int(np.median([step.num_collectives for step in steps])),
        axis=next((axis for axis in ("tp", "pcp", "dcp", "pp") if getattr(layout, axis) > 1), "tp"),
    )


def _fit_stage(samples: Sequence[Sample], stage: int) -> Fit:
    rows = np.array([features(sample.work) for sample in samples])
    seconds = np.array([sample.seconds[stage] for sample in samples])
    company = np.array([sample.company[stage] for sample in samples])
    if company.mean() > LEAST_COMPANY:
        rows = np.hstack([rows, rows * company[:, None]])
    return fit_steps(rows, seconds)


def _measures(fit: Fit, start: int) -> dict[str, Measure]:
    values, residuals = fit.coefficients[start : start + len(PARTS)], fit.residuals[start : start + len(PARTS)]
    return {
        name: Measure(float(value), "s", float(residual))
        for name, value, residual in zip(PARTS, values, residuals, strict=False)
        if value > 0
    }


def _fit_crossing(samples: Sequence[Sample], layout: Layout) -> dict[str, Measure]:
    """What crossed inside stages (tp, pcp, dcp): fixed and for each row."""
    crossed = [sample for sample in samples if sample.crossing_s > 0]
    if layout.ranks_per_stage == 1 or len(crossed) < 3:
        return {}
    rows = np.array([[1.0, sample.work.prefill_tokens + sample.work.decodes] for sample in crossed])
    fit = fit_steps(rows, np.array([sample.crossing_s for sample in crossed]))
    names = ("step", "row")
    return {
        name: Measure(float(value), "s", float(residual))
        for name, value, residual in zip(names, fit.coefficients, fit.residuals, strict=True)
    }


def expected(sample: Sample, cost: FittedCost) -> float:
    """Seconds that a measured step should have taken in the company that it had, all stages together."""
    amounts = features(sample.work)
    return sum(
        stage.mixed(share).seconds(amounts) for stage, share in zip(cost.stages, sample.company, strict=True)
    )


def spread_of(samples: Sequence[Sample], cost: FittedCost) -> dict[str, Measure]:
    """Standard deviations of measured ÷ fitted; outliers (beyond the 1st and 99th hundredth) are drawn in to those."""
    ratio = np.array([sum(sample.seconds) / expected(sample, cost) for sample in samples])
    ratio = np.clip(ratio, *np.percentile(ratio, (1, 99)))
    seconds = np.array([sample.start_ns // 10**9 for sample in samples])
    inside = [ratio[seconds == at] for at in np.unique(seconds)]
    drift = float(np.std([each.mean() for each in inside if len(each) >= _OF_A_SECOND] or [0.0]))
    prompts = ratio[[sample.work.prefill_tokens > 0 for sample in samples]]
    alone = max(0.0, float(prompts.var()) - drift**2) ** 0.5 if len(prompts) > 1 else 0.0
    return {"step": Measure(alone, "1"), "second": Measure(drift, "1")}


def client_measures(steps: Sequence[StepRecord], lone: Sequence[RequestRecord]) -> dict[str, Measure]:
    """The client's share of requests that had the server to themselves: medians, and the way there by prompt length."""
    there, first, later = [], [], []
    for request in lone:
        own = [step for step in steps if request.scheduled_ns <= step.start_ns and step.end_ns <= request.end_ns]
        sampled = sorted(step.end_ns for step in own if step.num_sampled)
        if request.status != "completed" or not sampled or len(sampled) != sum(request.chunk_tokens):
            continue
        there.append((request.prompt_tokens, (min(step.start_ns for step in own) - request.scheduled_ns) / 1e9))
        first.append((request.first_ns - sampled[0]) / 1e9)
        if len(sampled) > 1:
            later.append((request.last_ns - sampled[-1]) / 1e9)
    if len(there) < 3:
        return {}
    fit = fit_steps(np.array([[1.0, tokens] for tokens, _ in there]), np.array([seconds for _, seconds in there]))
    return {
        "request": Measure(float(fit.coefficients[0]), "s", float(fit.residuals[0])),
        "prompt_token": Measure(float(fit.coefficients[1]), "s", float(fit.residuals[1])),
        "first_token": _median(first),
        "next_token": _median(later),
    }


def _median(values: Sequence[float]) -> Measure:
    if not values:
        return Measure(0.0, "s")
    middle = float(np.median(values))
    spread = float(np.median(np.abs(np.array(values) - middle))) * 1.4826
    return Measure(middle, "s", spread / middle if middle > 0 else None)
