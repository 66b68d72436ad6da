"""A calibration from its plan to its file: which layouts, whether the machine is quiet, measuring, fitting, keeping."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from labkit.cluster.topology import look_at_machine, usable_cores
from labkit.lab.calibrate import Measured, OnProgress, measure_layouts
from labkit.lab.calibrate_quiet import look, notes_of, require_quiet
from labkit.lab.plan import utc_now
from labkit.layout import Deployment, Layout, LayoutError, is_legal, read_layout, require_deployable
from labkit.model.spec import ModelSpec, load_spec
from labkit.plan.calibration import Calibration, calibration_path, save_calibration
from labkit.plan.calibration_fit import fit_layout
from labkit.plan.calibration_hardware import save_hardware

MOST_RANKS = 8


@dataclass(frozen=True)
class CalibrationPlan:
    model: str
    spec: ModelSpec
    layouts: tuple[Layout, ...]
    num_ranks: int
    rounds: int = 2
    effort: float = 1.0
    """1: as designed; less: fewer steps a round."""
    anyway: bool = False

    @property
    def sentence(self) -> str:
        names = ", ".join(layout.slug for layout in self.layouts)
        return f"Measuring steps of {self.spec.name} on {self.num_ranks} ranks of this machine as {names}."


def plan_of(
    model: str, layouts: Sequence[str] = (), ranks: int = 0, *,
    rounds: int = 2, effort: float = 1.0, anyway: bool = False,
) -> CalibrationPlan:  # fmt: skip
    """Raises ValueError (LayoutError) or FileNotFoundError for what cannot be measured here."""
    spec, machine = load_spec(model), look_at_machine()
    if ranks < 0:
        raise ValueError(f"--ranks is {ranks}; give 1 or more, or 0: one a GPU or a core.")
    asked = [_one_layout(text) for text in layouts]
    usual = min(MOST_RANKS, len(machine.gpus) or max(2, usable_cores()))
    num_ranks = ranks or max([usual, *(layout.world_size for layout in asked)])
    chosen = asked or [each for each in default_layouts(num_ranks) if is_legal(each, spec, num_ranks, engine=True)]
    for layout in asked:
        require_deployable(layout, spec, num_ranks, engine=True)
    return CalibrationPlan(model, spec, tuple(dict.fromkeys(chosen)), num_ranks, rounds, effort, anyway)


def _one_layout(text: str) -> Layout:
    layout = read_layout(text)
    if isinstance(layout, Deployment):
        raise LayoutError(f"{text} is pools with roles: calibrate the layouts of its pools one by one.")
    return layout


def default_layouts(num_ranks: int) -> list[Layout]:
    """TP1, and each of TP, DP and PP over two ranks and over all of them."""
    degrees = sorted({degree for degree in (2, num_ranks) if 1 < degree <= num_ranks})
    return [Layout(), *(Layout.parse(f"{axis}{degree}") for degree in degrees for axis in ("tp", "dp", "pp"))]


def calibrate(
    plan: CalibrationPlan, out: Path | None = None, on_progress: OnProgress | None = None
) -> tuple[Calibration, Path]:
    """Measure, fit and keep. Raises ValueError with a sentence when the machine is too busy to be believed."""
    before = look()
    require_quiet(before, plan.anyway)
    load_average = os.getloadavg()[0]
    measured, state = measure_layouts(
        plan.layouts, rounds=plan.rounds, effort=plan.effort, on_progress=on_progress, model=plan.model,
        ranks=plan.num_ranks,
    )  # fmt: skip
    found = fit(plan, measured, state, load_average)
    path = save_calibration(found, out or calibration_path(plan.spec.name))
    if out is None:
        save_hardware(found, plan.spec)
    return found, path


def fit(
    plan: CalibrationPlan, measured: Sequence[Measured], state: dict[str, Any], load_average: float
) -> Calibration:
    layouts = {each.layout.slug: fit_layout(each.layout, each.steps, each.lone) for each in measured}
    names = ("fabric", "dtype", "device", "versions")
    about: dict[str, Any] = {
        "model": plan.spec.name,
        "host": socket.gethostname(),
        "num_cores": usable_cores(),
        "num_ranks": plan.num_ranks,
        "threads_per_rank": state.get("threads", 1),
        "memory_bytes": look_at_machine().memory_bytes,
        **{name: state[name] for name in names if state.get(name)},
        "settings": {
            name: state["settings"][name] for name in ("max_num_batched_tokens", "max_num_seqs", "block_size")
        },
        "measured_at": utc_now(),
        "seconds": round(sum(each.took_s for each in measured), 1),
        "load_average_before": round(load_average, 2),
        "others_share": round(state["others"], 4),
    }
    drift = float(np.mean([each.spread["second"].value for each in layouts.values()]))
    return Calibration(about, layouts, notes_of(state["others"], plan.num_ranks, drift))
