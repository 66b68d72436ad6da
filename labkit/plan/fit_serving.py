"""Fit what engines reach of a GPU on measured TTFT and TPOT, and measure how well it carries over to a model left out.

    python -m labkit.plan.fit_report ../shared/data

Every constant is a base times a factor for each class of the row. Least absolute error of log TPOT and log TTFT, with a
prior that keeps bases near what kernels reach and factors near 1 (how near stands in PRIORS), by Gauss–Newton with
reweighting. A model left out is left out of everything: its rows have weight 0, also in the factors of its engine's
version. The spreads of the priors were chosen with these errors in view; the rows of a model never were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import numpy as np

from labkit.plan.closed_loop import Loop, closed_loop
from labkit.plan.cost import kv_number_bytes
from labkit.plan.engine_cost import EngineConstants, axis_seconds, classes, launch_seconds, not_shorter, work_seconds
from labkit.plan.measured_rows import ROUNDS, Row
from labkit.plan.stage_shape import AxisCost, StageShape, stage_shapes
from labkit.plan.work import StepWork

PRIORS: dict[str, tuple[float, float, dict[str, float]]] = {
    "weight_efficiency": (0.88, 0.06, {"engine": 0.05}),
    "expert_efficiency": (0.8, 0.2, {"engine": 0.1, "experts": 0.2}),
    "kv_efficiency": (0.8, 0.15, {"engine": 0.1, "latent": 0.1}),
    "matrix_efficiency": (0.62, 0.1, {"engine": 0.08, "bits": 0.1}),
    "expert_matrix_efficiency": (0.25, 0.3, {"engine": 0.1, "experts": 0.2}),
    "attention_efficiency": (0.55, 0.2, {"engine": 0.1}),
    "corner": (3.0, 0.15, {}),
    "hidden_passes": (12.0, 0.3, {"engine": 0.1}),
    "step_s": (3e-4, 0.4, {"engine": 0.3, "version": 0.15}),
    "layer_s": (3.5e-5, 0.3, {"engine": 0.1, "version": 0.5}),
    "expert_layer_s": (4e-5, 0.2, {"experts": 0.5}),
    "latent_layer_s": (1e-5, 0.4, {}),
    "linear_layer_s": (4e-5, 0.7, {}),
    "prefill_layer_s": (2e-4, 0.7, {"engine": 0.4}),
    "prefill_expert_layer_s": (8e-4, 0.5, {"engine": 0.5, "version": 0.15}),
    "prefill_latent_layer_s": (1e-3, 0.7, {"engine": 0.4}),
    "prefill_linear_layer_s": (1e-3, 0.7, {}),
    "sequence_s": (1.2e-5, 0.4, {"engine": 0.4}),
    "reduce_s": (7e-6, 0.3, {"engine": 0.3}),
    "request_s": (2e-2, 0.5, {"engine": 1.2, "version": 0.2}),
    "request_token_s": (2e-6, 0.5, {"engine": 0.4}),
    "queue_share": (0.4, 0.3, {}),
    "clump_share": (0.4, 0.3, {}),
    "thin_columns": (80.0, 0.7, {"experts": 0.5}),
}
"""Constant → (centre, spread of its logarithm, class kind → spread of a factor's logarithm)."""
NAMES = tuple(PRIORS)
ROUND_S = 0.07
"""Below this relative error a row's pull is quadratic, above it constant."""
TTFT_WEIGHT = 0.5
ROW_WEIGHT = 1.2
"""Of a row's absolute log error against the priors."""
_MIXED = {"sglang": 0.0}


@dataclass(frozen=True)
class Sample:
    """A measured row, in seconds."""

    row: Row
    ttft_s: float
    tpot_s: float
    ttft_counts: bool = True


class Fitter:
    """The rows as arrays, once; then fits by weight."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples
        rows = [sample.row for sample in samples]
        self.log_ttft, self.log_tpot = (np.log([getattr(s, what) for s in samples]) for what in ("ttft_s", "tpot_s"))
        self.ttft_counts = np.array([float(sample.ttft_counts) for sample in samples])
        self.shape, self.axis = _arrays(rows)
        self.bandwidth = np.array([row.hardware.device.memory_bandwidth.value for row in rows])
        self.loop = {
            "prompt": _array(rows, lambda row: row.prompt), "output": _array(rows, lambda row: row.output),
            "requests": _array(rows, lambda row: row.concurrency / row.layout.dp),
            "budget": _array(rows, lambda row: row.settings.max_num_batched_tokens),
            "window": _array(rows, lambda row: row.spec.sliding_window or 1e9),
            "mixed": _array(rows, lambda row: _MIXED.get(row.engine, 1.0)),
            "wait_steps": _array(rows, lambda row: row.wait_steps),
            "burst_share": np.full(len(rows), 1 / ROUNDS),
        }  # fmt: skip
        self.graph_tokens = _array(rows, lambda row: row.graph_tokens)
        self.exact = _array(rows, lambda row: not row.inferencex)
        self.classes = [classes(row.engine, row.spec, row.version) for row in rows]
        self.keys, self.centre, self.spread, self.member = self._unknowns()

    def _unknowns(self) -> tuple[list[tuple[str, str, str]], Any, Any, Any]:
        """(constant, class kind, class) of each unknown, with prior centre and spread, and the rows that it touches."""
        keys, centre, spread, member = [], [], [], []
        for name, (middle, width, kinds) in PRIORS.items():
            keys.append((name, "", ""))
            centre.append(math.log(middle))
            spread.append(width)
            member.append(np.ones(len(self.samples)))
            for kind, narrow in kinds.items():
                of = np.array([each[kind] for each in self.classes])
                for value in sorted(set(of)):
                    keys.append((name, kind, value))
                    centre.append(0.0)
                    spread.append(narrow)
                    member.append((of == value).astype(float))
        return keys, np.array(centre), np.array(spread), np.array(member)

    def constants(self, x: Any) -> Any:
        """Arrays by constant's name, one number a row."""
        values = {name: np.zeros(len(self.samples)) for name in NAMES}
        for (name, _, _), value, member in zip(self.keys, x, self.member, strict=True):
            values[name] += value * member
        return SimpleNamespace(**{name: np.exp(value) for name, value in values.items()})

    def predict(self, constants: Any) -> Loop:
        def seconds(work: StepWork) -> Any:
            busy = sum(work_seconds(self.shape, constants, self.bandwidth, work))
            busy = busy + axis_seconds(self.axis, constants, work)
            if np.any(work.prefill_tokens):
                busy = not_shorter(busy, launch_seconds(self.shape, constants), work, self.graph_tokens)
            return constants.step_s + busy

        request_s = constants.request_s + constants.request_token_s * self.loop["prompt"]
        return closed_loop(
            seconds, request_s=request_s, queue_share=constants.queue_share,
            clump_share=constants.clump_share * self.exact, **self.loop,
        )  # fmt: skip

    def _errors(self, constants: Any) -> tuple[Any, Any]:
        loop = self.predict(constants)
        return np.log(loop.tpot_s) - self.log_tpot, np.log(loop.ttft_s) - self.log_ttft

    def fit(self, weight: Any, turns: int = 12) -> Any:
        """The unknowns that suit the rows of weight 1 best; rows of weight 0 have no say."""
        x = self.centre.copy()
        pull = ROW_WEIGHT * np.stack([weight, weight * TTFT_WEIGHT * self.ttft_counts])
        errors = np.stack(self._errors(self.constants(x)))
        cost, damp = self._cost(x, errors, pull), 0.3
        for _ in range(turns):
            step, cost_of = self._steps(x, errors, pull)
            for _ in range(6):
                trial = x + step(damp)
                tried = np.stack(self._errors(self.constants(trial)))
                found = cost_of(trial, tried)
                if found < cost:
                    break
                damp *= 5
            if found >= cost:
                break
            gained, x, errors, cost, damp = cost - found, trial, tried, found, max(damp / 4, 1e-3)
            if gained < 4e-4 * cost:
                break
        return x

    def _cost(self, x: Any, errors: Any, pull: Any) -> float:
        rows = (pull * np.sqrt(errors**2 + ROUND_S**2)).sum()
        return float(rows + 0.5 * (((x - self.centre) / self.spread) ** 2).sum())

    def _steps(self, x: Any, errors: Any, pull: Any) -> tuple[Any, Any]:
        """A damped Gauss–Newton step as a function of the damping. A row's slope in a factor is its slope in the
        constant, so each constant is tried once for all its classes."""
        constants, slopes = self.constants(x), {}
        for name in NAMES:
            moved = SimpleNamespace(**{**vars(constants), name: getattr(constants, name) * math.exp(1e-3)})
            slopes[name] = (np.stack(self._errors(moved)) - errors) / 1e-3
        slope = np.stack([slopes[name] * member for (name, _, _), member in zip(self.keys, self.member, strict=True)])
        scaled = pull / np.sqrt(errors**2 + ROUND_S**2)
        normal = np.einsum("ikr,jkr,kr->ij", slope, slope, scaled, optimize=True) + np.diag(1 / self.spread**2)
        gradient = np.einsum("ikr,kr->i", slope, scaled * errors) + (x - self.centre) / self.spread**2

        def step(damp: float) -> Any:
            damped = normal + 0.1 * damp * np.diag(np.diag(normal))
            return np.clip(np.linalg.solve(damped, -gradient), -0.7, 0.7)

        return step, lambda trial, tried: self._cost(trial, tried, pull)

    def left_out(self) -> tuple[Any, Any]:
        """(TTFT, TPOT) in seconds of each row, by a fit that has seen no row of its model."""
        ttft, tpot = np.zeros(len(self.samples)), np.zeros(len(self.samples))
        models = np.array([sample.row.model for sample in self.samples])
        for model in sorted(set(models)):
            loop = self.predict(self.constants(self.fit((models != model).astype(float))))
            ttft, tpot = np.where(models == model, loop.ttft_s, ttft), np.where(models == model, loop.tpot_s, tpot)
        return ttft, tpot


def _array(rows: Sequence[Row], of: Any) -> Any:
    return np.array([float(of(row)) for row in rows])


def _arrays(rows: Sequence[Row]) -> tuple[Any, Any]:
    """Stage shapes and the sum of all axes as arrays over rows (pipelines are not among the measured rows)."""
    shapes: list[StageShape] = []
    for row in rows:
        number = kv_number_bytes(row.spec, row.settings)
        found = stage_shapes(row.layout, row.spec, row.hardware, number, row.engine != "labkit")
        shapes.append(found[0])
    names = [each.name for each in fields(StageShape) if each.name != "axes"]
    shape = SimpleNamespace(**{name: np.array([float(getattr(each, name)) for each in shapes]) for name in names})
    sums = {each.name: np.zeros(len(rows)) for each in fields(AxisCost) if each.name != "axis"}
    for at, each in enumerate(shapes):
        for axis in each.axes:
            for name in sums:
                more = getattr(axis, name)
                sums[name][at] = max(sums[name][at], more) if name == "small_limit_s" else sums[name][at] + more
    return shape, SimpleNamespace(**sums)


assert {each.name for each in fields(EngineConstants)} == set(NAMES)
