"""What a visitor of the page Planner asks for, and the case that it makes: checked here, so that whatever is wrong with
it comes back as one sentence while everything that was set stays set.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import msgspec

from labkit.load.workload import workloads_dir
from labkit.model.shapes import ModelSpec
from labkit.model.spec import list_models, load_spec, parse_config
from labkit.paths import home_dir
from labkit.plan.case import Case
from labkit.plan.demand import Demand, read_demand
from labkit.plan.hardware import list_devices, load_hardware
from labkit.plan.objective import PlanObjective
from labkit.plan.work import EngineSettings

PASTED = "pasted config"
FIXED_SETS = ("small-engines-256",)
"""Workloads that are a fixed set of prompts sent at once: nothing to plan for."""


class Inputs(msgspec.Struct, kw_only=True, frozen=True):
    """As the page sends them; the defaults are what a visitor finds."""

    n: int = 0
    """Counts a visitor's moves; answers carry it back."""
    model: str = "llama-3.1-70b"
    config: str = ""
    """A pasted config.json, which then counts instead of `model`."""
    device: str = "h200"
    num_gpus: int = 8
    nodes: int = 1
    link: str = ""
    engine: str = "vllm"
    workload: str = "lengths"
    """lengths (the two below), trace (a file), or a name under data/workloads."""
    trace: str = ""
    prompt_tokens: int = 2048
    output_tokens: int = 256
    load: str = "rate"
    rate: float = 4.0
    concurrency: int = 32
    ttft_ms: float = 1000.0
    tpot_ms: float = 50.0
    percentile: str = "p95"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    kv_cache_dtype: str = "auto"
    layout: str = ""
    """That is looked at; empty: the answer."""


def options() -> dict[str, object]:
    """What can be chosen, and what stands there first."""
    workloads = sorted(path.stem for path in workloads_dir().glob("*.toml"))
    return {
        "models": list_models(),
        "devices": [*list_devices(), *(["here"] if (home_dir() / "hardware" / "here.toml").is_file() else [])],
        "workloads": [name for name in workloads if name not in FIXED_SETS],
        "defaults": msgspec.to_builtins(Inputs()),
    }


def case_of(inputs: Inputs) -> Case:
    """Raises ValueError or OSError with a sentence."""
    hardware = load_hardware(f"{inputs.num_gpus}x{inputs.device}", inputs.nodes, inputs.link)
    objective = PlanObjective(inputs.ttft_ms, inputs.tpot_ms, percentile=inputs.percentile)
    settings = EngineSettings(
        max_num_seqs=inputs.max_num_seqs,
        max_num_batched_tokens=max(inputs.max_num_batched_tokens, inputs.max_num_seqs),
        kv_cache_dtype=inputs.kv_cache_dtype,
    )
    price = hardware.device.price_per_hour
    return Case(spec_of(inputs), hardware, demand_of(inputs), objective, settings, inputs.engine, price)


def spec_of(inputs: Inputs) -> ModelSpec:
    return pasted_spec(inputs.config) if inputs.config else load_spec(inputs.model)


@functools.lru_cache(maxsize=8)
def pasted_spec(text: str) -> ModelSpec:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"The pasted text is no JSON (line {error.lineno}: {error.msg}): paste a whole config.json, from {{ to }}."
        ) from None
    if not isinstance(config, dict):
        raise ValueError(f"The pasted JSON is a {type(config).__name__}, not an object: paste a whole config.json.")
    name = str(config.get("_name_or_path") or config.get("model_type") or PASTED)
    try:
        return parse_config(config, name.rpartition("/")[2] or PASTED)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"The pasted config.json cannot be read as a decoder's: {error!r}.") from None


def asked_of(inputs: Inputs) -> str:
    """The workload as one types it at `labkit plan --workload`."""
    if inputs.workload == "lengths":
        return f"{inputs.prompt_tokens}/{inputs.output_tokens}"
    if inputs.workload == "trace":
        if not inputs.trace.endswith((".csv", ".jsonl")):
            raise ValueError(f"{inputs.trace or 'An empty name'} is no trace: give the path of a .csv or .jsonl file.")
        return inputs.trace
    return inputs.workload


def demand_of(inputs: Inputs) -> Demand:
    by_rate = inputs.load == "rate"
    return replace(
        _demand(asked_of(inputs)),
        rate=inputs.rate if by_rate else None,
        concurrency=None if by_rate else inputs.concurrency,
    )


@functools.lru_cache(maxsize=16)
def _demand(asked: str) -> Demand:
    """Lengths are drawn, or a trace is read, once; its load is set by the page."""
    return read_demand(asked, rate=1.0)
