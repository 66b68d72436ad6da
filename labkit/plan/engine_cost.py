"""How much of a device an engine reaches, and what it adds: few constants a family of engines, and the one formula.

A part of a step that reads B bytes and computes F operations takes (m^p + c^p)^(1/p), with m = B ÷ (bandwidth ·
efficiency), c = F ÷ (rate · efficiency): a roofline whose corner is round (Williams, Waterman, Patterson 2009, with the
corner of measured kernels). The constants stand in data/fitted/engines.toml with their residual, fitted by
`labkit.plan.fit_serving` on measured TTFT and TPOT of real engines. The formula is written with operators only, so
that the fit runs it over arrays of rows and a step cost over plain floats.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from labkit.paths import data_dir

ENGINES = ("vllm", "sglang", "trtllm", "labkit")


@dataclass(frozen=True, slots=True)
class EngineConstants:
    """One engine's. Efficiencies are shares of the datasheet's rate; `*_s` are seconds."""

    weight_efficiency: float
    """Of the memory bandwidth, reading dense weights."""
    expert_efficiency: float
    """The same for routed experts."""
    kv_efficiency: float
    """The same for keys and values of decodes."""
    matrix_efficiency: float
    """Of the dense rate, in large products."""
    expert_matrix_efficiency: float
    attention_efficiency: float
    """Of the bfloat16 rate, in the attention of prompts."""
    corner: float
    """The power p of the round corner."""
    hidden_passes: float
    """How often a layer reads or writes a token's hidden state outside the products (norms, activation, quantising)."""
    step_s: float
    """Host and sampler, once a step."""
    layer_s: float
    """Launches and small kernels of a layer."""
    expert_layer_s: float
    """More of them in a layer with experts."""
    prefill_step_s: float
    """More in a step with prompt tokens (no CUDA graph)."""
    sequence_s: float
    """Host work of one sequence in a step."""
    reduce_s: float
    """Latency of a small all-reduce in the engine's own kernel."""
    request_s: float
    """HTTP, tokenizer and detokenizer before the first token leaves."""
    request_token_s: float
    """The same for each prompt token."""
    queue_share: float
    """How much of a queue's length an arriving prompt waits for; 0 where arrivals are spaced by the loop itself."""


def work_seconds(shape: Any, c: Any, bandwidth: Any, work: Any) -> tuple[Any, ...]:
    """(matrices, experts, attention, kv, head, elementwise, overhead) of one stage, in seconds, without what crosses.

    `shape`: a StageShape, `c`: EngineConstants, `work`: a StepWork (or the same names as arrays).
    """
    tokens = work.prefill_tokens * shape.prefill_share + work.decodes
    p = c.corner
    matrices = _corner(
        shape.dense_bytes / (bandwidth * c.weight_efficiency),
        shape.dense_flops * tokens / (shape.dense_rate * c.matrix_efficiency), p,
    )  # fmt: skip
    touched = 1 - shape.expert_miss ** (tokens * shape.expert_replicas)
    experts = _corner(
        shape.expert_bytes * touched / (bandwidth * c.expert_efficiency),
        shape.expert_flops * tokens / (shape.expert_rate * c.expert_matrix_efficiency), p,
    )  # fmt: skip
    pairs = work.prefill_pairs * shape.pair_flops + work.prefill_window_pairs * shape.window_pair_flops
    attention = pairs * shape.prefill_share / (shape.attention_rate * c.attention_efficiency)
    context = (work.decode_context + work.prefill_context) * shape.context_bytes
    window = (work.decode_window_context + work.prefill_context) * shape.window_context_bytes
    kv = (context + window) / (bandwidth * c.kv_efficiency)
    head = _corner(
        shape.head_bytes / (bandwidth * c.weight_efficiency),
        shape.head_flops * work.logits / (shape.head_rate * c.matrix_efficiency), p,
    )  # fmt: skip
    elementwise = c.hidden_passes * shape.hidden_bytes * tokens / bandwidth
    prefilling = work.prefill_tokens / (work.prefill_tokens + 1)  # 0 without, 1 with prompt tokens
    overhead = (
        c.layer_s * shape.layers + c.expert_layer_s * shape.moe_layers
        + c.sequence_s * (work.decodes + work.prefill_seqs) + c.prefill_step_s * prefilling
    )  # fmt: skip
    return matrices, experts, attention, kv, head, elementwise, overhead


def axis_seconds(axis: Any, c: Any, work: Any) -> Any:
    """What one axis's operations take in a step. `axis`: an AxisCost."""
    small = (axis.small_limit_s + c.reduce_s - abs(axis.small_limit_s - c.reduce_s)) / 2  # the smaller of the two
    prefilling = work.prefill_tokens / (work.prefill_tokens + 1)
    decoding = work.decodes / (work.decodes + 1)
    return (
        axis.small_ops * small + axis.both_latency_s
        + axis.prefill_latency_s * prefilling + axis.decode_latency_s * decoding
        + axis.prefill_token_s * work.prefill_tokens + axis.decode_token_s * work.decodes + axis.logit_s * work.logits
    )  # fmt: skip


def _corner(memory: Any, compute: Any, power: Any) -> Any:
    return (memory**power + compute**power) ** (1 / power)


def fitted_file() -> Path:
    return data_dir() / "fitted" / "engines.toml"


def engine_constants(engine: str) -> EngineConstants:
    """The constants of an engine, as fitted. Raises ValueError for an unknown one."""
    if engine not in ENGINES:
        raise ValueError(f"{engine!r} is no engine that was measured: choose one of {', '.join(ENGINES)}.")
    file = fitted_file()
    table = read_fitted(file, file.stat().st_mtime_ns)
    given = {**table["usual"], **table.get(engine, {})}
    return EngineConstants(**{each.name: float(given[each.name]["value"]) for each in fields(EngineConstants)})


@lru_cache(maxsize=4)
def read_fitted(file: Path, mtime_ns: int) -> dict[str, Any]:
    """The tables of engines.toml; `mtime_ns` so that a file that was fitted anew is read anew."""
    return tomllib.loads(file.read_text(encoding="utf-8"))


def error_bands(spec: Any, hardware: Any, engine: str) -> tuple[float, float]:
    """(TTFT, TPOT) relative errors to expect: of this engine's rows with the model left out; half as much again for a
    GPU or a kind of model (dense, experts, latent attention) that no row has."""
    file = fitted_file()
    table = read_fitted(file, file.stat().st_mtime_ns).get("bands", {})
    kind = "latent" if spec.mla else "experts" if spec.moe else "dense"
    bands = table.get(f"{engine}-{kind}") or table.get(engine) or table.get("all", {"ttft": 0.5, "tpot": 0.4})
    seen = hardware.device.name in table.get("gpus", ()) and f"{engine}-{kind}" in table
    widened = 1.0 if seen else 1.5
    return bands["ttft"] * widened, bands["tpot"] * widened
