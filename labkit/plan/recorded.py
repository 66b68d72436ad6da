"""GPUs with graphics memory beside the cost model: a factor on every step, learnt from runs on other such GPUs.

The constants in data/fitted/engines.toml come from servings on Hopper. A desktop or workstation GPU reaches another
share of its datasheet; how much is known from recorded runs (data/fitted/recorded.toml, written by
benchmarks/replay_vllm.py). A GPU is never given the factor of its own run.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from labkit.paths import data_dir
from labkit.plan.hardware import Parameter
from labkit.plan.work import StepCost, StepWork

GRAPHICS = ("rtx4090", "rtxpro6000", "l40s")


def recorded_file() -> Path:
    return data_dir() / "fitted" / "recorded.toml"


def left_out_factor(gpu: str) -> Parameter:
    """The mean factor of the runs on other GPUs of its kind; 1 for another kind, or when there are none."""
    nothing = Parameter(1.0, "1", "datasheet", "no recorded run of another GPU of this kind")
    if gpu not in GRAPHICS or not recorded_file().is_file():
        return nothing
    tables = tomllib.loads(recorded_file().read_text(encoding="utf-8"))
    others = [Parameter(**table["factor"]) for name, table in tables.items() if name != gpu]
    if not others:
        return nothing
    sources = "; ".join(other.source for other in others)
    return replace(others[0], value=fmean(other.value for other in others), source=sources)


class Times:
    """A cost whose steps take `factor` times as long."""

    def __init__(self, cost: StepCost, factor: float) -> None:
        self._cost, self.factor = cost, factor

    def seconds(self, work: StepWork) -> float:
        return self.factor * self._cost.seconds(work)

    def interval(self, work: StepWork) -> float:
        return self.factor * self._cost.interval(work)

    def parts(self, work: StepWork) -> dict[str, float]:
        return {part: self.factor * seconds for part, seconds in self._cost.parts(work).items()}

    def handoff_seconds(self, num_tokens: int) -> float:
        return self._cost.handoff_seconds(num_tokens)
