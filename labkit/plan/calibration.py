"""A calibration: what steps cost on one machine, by layout, as `labkit calibrate` measured it, kept as a TOML file.

`save_calibration` and `load_calibration` are the file under LABKIT_HOME; `Calibration.cost(layout)` is what simulations
and predictions ask. Each figure in the file says that it was measured, and its residual.
"""

from __future__ import annotations

import json
import re
import socket
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from labkit.layout import Layout
from labkit.model.shapes import ModelSpec
from labkit.paths import home_dir, write_whole
from labkit.plan.fitted_cost import ClientCost, FittedCost, stage_cost


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
    spread: dict[str, Measure] = field(default_factory=dict)
    """How far measured steps lie from the fit, as standard deviations of their ratio: `step`, one with a prompt in it
    from those around it; `second`, the mean of a second from that of another, which is the machine's own drift."""
    num_steps: int = 0
    num_dropped: int = 0
    error: float = 0.0
    bias: float = 0.0
    axis: str = "tp"
    """What crosses within a stage."""
    num_collectives: int = 0
    """Of a step."""

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


# ---- the file


def calibration_path(model: str, machine: str = "") -> Path:
    """Where this machine's calibration of a model lies."""
    safe = re.sub(r"[^A-Za-z0-9._]+", "-", f"{machine or socket.gethostname()}-{model}")
    return home_dir() / "calibrations" / f"{safe}.toml"


def save_calibration(calibration: Calibration, path: Path) -> Path:
    """Written whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_whole(path, "\n".join(_lines(calibration)) + "\n")


def load_calibration(model_or_path: str | Path) -> Calibration:
    """This machine's calibration of a model, or a file. Raises ValueError with a sentence."""
    path = Path(model_or_path)
    if path.suffix != ".toml":
        path = calibration_path(str(model_or_path))
    if not path.is_file():
        raise ValueError(
            f"Steps of {model_or_path} were not measured on this machine: run `labkit calibrate --model "
            f"{model_or_path}` first (minutes). Looked for {path}."
        )
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        layouts = {name: _read_layout(name, given) for name, given in table["layouts"].items()}
        return Calibration(table["about"], layouts, tuple(table.get("notes", ())))
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is no calibration ({type(error).__name__}: {error}): measure again with `labkit calibrate`."
        ) from None


def measured_cost(layout: Layout, spec: ModelSpec) -> FittedCost | None:
    """What was measured here of a model's steps, all replicas and stages at work; None where nothing was."""
    path = calibration_path(spec.name)
    if not path.is_file():
        return None
    found = _kept(path, path.stat().st_mtime_ns).layouts.get(layout.slug)
    return None if found is None else found.cost().with_company(1.0)


@lru_cache(maxsize=8)
def _kept(path: Path, mtime_ns: int) -> Calibration:
    return load_calibration(path)


def _lines(calibration: Calibration) -> Iterator[str]:
    yield "# What steps cost on this machine, measured by labkit calibrate. Residuals are relative."
    yield f"notes = {json.dumps(list(calibration.notes), ensure_ascii=False)}"
    yield "\n[about]"
    yield from (f"{name} = {_toml(value)}" for name, value in calibration.about.items())
    for name, fit in calibration.layouts.items():
        yield f"\n[layouts.{json.dumps(name)}]"
        yield from (f"{each} = {_toml(getattr(fit, each))}" for each in _PLAIN)
        for kind in _TABLES:
            yield from _table(f"layouts.{json.dumps(name)}.{kind}", getattr(fit, kind))
        for alone, company in fit.stages:
            yield f"\n[[layouts.{json.dumps(name)}.stages]]"
            yield from _table(f"layouts.{json.dumps(name)}.stages.alone", alone)
            yield from _table(f"layouts.{json.dumps(name)}.stages.company", company)


_PLAIN = ("num_steps", "num_dropped", "error", "bias", "axis", "num_collectives")
_TABLES = ("client", "crossing", "pipeline", "spread")


def _table(name: str, measures: Mapping[str, Measure]) -> Iterator[str]:
    if measures:
        yield f"\n[{name}]"
    for part, each in measures.items():
        residual = "" if each.residual is None else f", residual = {each.residual:.3g}"
        yield f'{part} = {{ value = {each.value:.6g}, unit = "{each.unit}", origin = "{each.origin}"{residual} }}'


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(name)} = {_toml(each)}" for name, each in value.items()) + " }"
    if isinstance(value, float):
        return f"{value:.6g}" if any(sign in f"{value:.6g}" for sign in ".en") else f"{value:.6g}.0"
    return json.dumps(value, ensure_ascii=False)


def _read_layout(name: str, given: Mapping[str, Any]) -> LayoutFit:
    stages = tuple((_read(stage.get("alone")), _read(stage.get("company"))) for stage in given["stages"])
    plain: dict[str, Any] = {each: given[each] for each in _PLAIN}
    tables: dict[str, Any] = {kind: _read(given.get(kind)) for kind in _TABLES}
    return LayoutFit(name, stages, **tables, **plain)


def _read(table: Mapping[str, Any] | None) -> dict[str, Measure]:
    return {name: Measure(**each) for name, each in (table or {}).items()}
