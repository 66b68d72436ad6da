"""The machine at hand as hardware: what a calibration says of its memory, its products and what joins its ranks.

They are rates that steps reached, not peaks: launches and the engine's turn are inside. Kept where `load_hardware`
looks for "here".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labkit.model.counts import parameters
from labkit.model.shapes import DTYPE_BYTES, ModelSpec
from labkit.paths import home_dir
from labkit.plan.calibration import Calibration, LayoutFit, Measure
from labkit.plan.fitted_cost import ROWS


def save_hardware(calibration: Calibration, spec: ModelSpec) -> Path | None:
    """hardware/here.toml under LABKIT_HOME; None (and nothing written) where the steps did not tell all of it."""
    alone, together = calibration.layouts.get("tp1"), calibration.layouts.get("tp2")
    if alone is None or together is None or not together.crossing:
        return None
    about = calibration.about
    dtype_bytes = DTYPE_BYTES.get(str(about.get("dtype", "float32")), 4)
    figures = {**device_figures(alone, spec, dtype_bytes), **link_figures(together, spec, dtype_bytes)}
    if not {"memory_bandwidth", "rate", "latency_s", "bandwidth"} <= set(figures):
        return None
    path = home_dir() / "hardware" / "here.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".begun")
    draft.write_text("\n".join(_lines(about, figures)) + "\n", encoding="utf-8")
    return draft.replace(path)


def device_figures(fit: LayoutFit, spec: ModelSpec, dtype_bytes: int) -> dict[str, Measure]:
    """memory_bandwidth: the weights over a step's fixed cost. rate: operations of a row over the price of the last."""
    alone, _ = fit.stages[0]
    count = parameters(spec)
    read = sum(count.values()) - (0 if spec.tie_word_embeddings else count.get("embedding", 0))
    row_flops = 2 * (sum(count.values()) - count.get("embedding", 0) - count.get("head", 0))
    row = next((alone[name] for name in reversed(ROWS) if name in alone), None)
    found = {}
    if (step := alone.get("step")) is not None:
        found["memory_bandwidth"] = Measure(read * dtype_bytes / step.value, "B/s", step.residual)
    if row is not None:
        found["rate"] = Measure(row_flops / row.value, "FLOP/s", row.residual)
    return found


def link_figures(fit: LayoutFit, spec: ModelSpec, dtype_bytes: int) -> dict[str, Measure]:
    """latency_s: of one collective of few rows. bandwidth: a row's bytes over what one more row costs a collective."""
    calls = max(1, fit.num_collectives)
    fixed, row = fit.crossing["step"], fit.crossing["row"]
    found = {"latency_s": Measure(fixed.value / calls, "s", fixed.residual)}
    if row.value > 0:
        found["bandwidth"] = Measure(spec.hidden_size * dtype_bytes * calls / row.value, "B/s", row.residual)
    return found


def _lines(about: dict[str, Any], figures: dict[str, Measure]) -> list[str]:
    how = f"labkit calibrate with {about['model']}, {about['measured_at']}"
    memory = Measure(about["memory_bytes"] / about["num_ranks"], "B")
    lines = [
        "# This machine, as labkit calibrate measured it: load_hardware reads it as `here`.",
        "[sources]",
        f'here = "{how}"',
        "[device]",
        'name = "here"',
        f'title = "{about["host"]}: {about["num_ranks"]} ranks on {about["num_cores"]} cores"',
        f"gpus = {about['num_ranks']}",
        'server = "pcie"',
        'inside = "shm"',
        f"memory_bytes = {_parameter(memory)}",
        f"memory_bandwidth = {_parameter(figures['memory_bandwidth'])}",
        "[device.rates]",
        f"{about.get('dtype', 'float32')} = {_parameter(figures['rate'])}",
        "[links.shm]",
        f"latency_s = {_parameter(figures['latency_s'])}",
        f"bandwidth = {_parameter(figures['bandwidth'])}",
    ]
    return lines


def _parameter(each: Measure) -> str:
    residual = "" if each.residual is None else f", residual = {each.residual:.3g}"
    return f'{{ value = {each.value:.6g}, unit = "{each.unit}", origin = "measured", source = "here"{residual} }}'
