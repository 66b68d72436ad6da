"""A calibration: what steps cost on one machine, by layout, fitted to measured steps and kept as a TOML file.

`fit_layout` turns one layout's measured steps and requests into its costs; `save_calibration` and `load_calibration`
are the file under LABKIT_HOME; `Calibration.cost(layout)` is what simulations and predictions ask. Each figure in the
file says that it was measured, and its residual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from labkit.layout import Layout
from labkit.measure.records import RequestRecord, StepRecord
from labkit.plan.fitted_cost import PARTS, ClientCost, FittedCost, StageCost, features, stage_cost
from labkit.plan.step_fit import Fit, fit_steps
from labkit.plan.step_samples import Sample, pipeline_times, samples_of

LEAST_COMPANY = 0.02
"""Where steps were never longer beside others than this, on average, company was not measured."""


@dataclass(frozen=True)
class Measure:
    """One figure. Its residual is relative, None where it has none."""

    value: float
    unit: str
    residual: float | None = None
    origin: str = "measured"


@dataclass(frozen=True)
class LayoutFit:
    """Of one layout. stages: for each, the parts of PARTS alone and in company (those above 0)."""

    layout: str
    stages: tuple[tuple[dict[str, Measure], dict[str, Measure]], ...]
    pipeline: dict[str, Measure] = field(default_factory=dict)
    """hops, turnaround."""
    crossing: dict[str, Measure] = field(default_factory=dict)
    """step, row: seconds of crossing between ranks, within the stages' time."""
    client: dict[str, Measure] = field(default_factory=dict)
    num_steps: int = 0
    num_dropped: int = 0
    error: float = 0.0
    bias: float = 0.0
    axis: str = "tp"

    def cost(self) -> FittedCost:
        return FittedCost(
            layout=self.layout,
            stages=tuple(stage_cost(_values(alone), _values(company)) for alone, company in self.stages),
            hops_s=_value(self.pipeline, "hops"),
            turnaround_s=_value(self.pipeline, "turnaround"),
            collective=(_value(self.crossing, "step"), _value(self.crossing, "row")),
            axis=self.axis,
            client=ClientCost(**{f"{name}_s": each.value for name, each in self.client.items()}),
            error=self.error,
        )


@dataclass(frozen=True)
class Calibration:
    """about: machine, model, settings and load while it was measured, as they stand in the file."""

    about: dict[str, Any]
    layouts: dict[str, LayoutFit]
    notes: tuple[str, ...] = ()
    """Sentences that whoever believes it must see."""

    def cost(self, layout: str) -> FittedCost:
        """Raises ValueError, with what was measured, for a layout that was not."""
        slug = Layout.parse(layout).slug
        if slug not in self.layouts:
            raise ValueError(
                f"{slug} was not measured here: the calibration has {', '.join(self.layouts)}. "
                f"Measure it with labkit calibrate --layout {slug}."
            )
        return self.layouts[slug].cost()


def _values(measures: Mapping[str, Measure]) -> dict[str, float]:
    return {name: each.value for name, each in measures.items()}


def _value(measures: Mapping[str, Measure], name: str) -> float:
    return measures[name].value if name in measures else 0.0


# ---- fitting


def fit_layout(
    layout: Layout, steps: Sequence[StepRecord], requests: Sequence[RequestRecord] = (), lone: Sequence[RequestRecord] = ()
) -> LayoutFit:
    """requests: all, for the client's share of them; lone: those that had the server to themselves.

    Raises ValueError when there are too few steps to fit.
    """
    samples = samples_of(steps, layout)
    fits = [_fit_stage(samples, stage) for stage in range(layout.pp)]
    hops, turnaround = pipeline_times(steps, layout)
    return LayoutFit(
        layout=layout.slug,
        stages=tuple((_measures(fit, 0), _measures(fit, len(PARTS))) for fit in fits),
        pipeline={"hops": Measure(hops, "s"), "turnaround": Measure(turnaround, "s")} if layout.pp > 1 else {},
        crossing=_fit_crossing(samples, layout),
        client=client_measures(steps, lone) if lone else {},
        num_steps=len(samples),
        num_dropped=max(fit.num_dropped for fit in fits),
        error=float(np.mean([fit.error for fit in fits])),
        bias=float(np.mean([fit.bias for fit in fits])),
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


def as_stage(alone: Mapping[str, Measure], company: Mapping[str, Measure]) -> StageCost:
    return stage_cost(_values(alone), _values(company))
