"""How much of a device an engine reaches, and what it adds: few constants a family of engines, and the one formula.

A part of a step that reads B bytes and computes F operations takes (m^p + c^p)^(1/p), with m = B ÷ (bandwidth ·
efficiency), c = F ÷ (rate · efficiency): a roofline whose corner is round (Williams, Waterman, Patterson 2009). A step
that carries a prompt cannot be shorter than its launches from the host, with a corner as round. Constants are a base
times a factor for each class that a row is of (engine, version, format of the experts, latent attention …); they stand
in data/fitted/engines.toml with their residual, fitted by `labkit.plan.fit_serving` on TTFT and TPOT of real engines.
The formula is written with operators only, so that the fit runs it over arrays of rows and a step cost over floats.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from labkit.model.shapes import ModelSpec
from labkit.paths import data_dir

ENGINES = ("vllm", "sglang", "trtllm", "labkit")
LAUNCH_CORNER = 4
GRAPH_TOKENS = {"vllm": 512}
"""Tokens of a step up to which an engine's graphs cover prompts too: vLLM's largest captured size, by default."""
MAX_OF_NORMALS = {1: 0.0, 2: 0.564, 4: 1.029, 8: 1.424, 16: 1.766, 32: 2.070}
"""Expected maximum of n standard normals: how far the busiest of n expert ranks is above the mean, in deviations."""


@dataclass(frozen=True, slots=True)
class EngineConstants:
    """Of one engine and class of model. Efficiencies are shares of the datasheet's rate; `*_s` are seconds."""

    weight_efficiency: float
    """Of the memory bandwidth, reading dense weights."""
    expert_efficiency: float
    """The same for routed experts as wide as they come."""
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
    """More of them in a layer with experts, with latent attention, with linear attention."""
    latent_layer_s: float
    linear_layer_s: float
    prefill_layer_s: float
    """Host time of a layer's launches where no CUDA graph replays them: steps with prompt tokens."""
    prefill_expert_layer_s: float
    prefill_latent_layer_s: float
    prefill_linear_layer_s: float
    sequence_s: float
    """Host work of one sequence in a step."""
    reduce_s: float
    """Latency of a small all-reduce in the engine's own kernel."""
    request_s: float
    """HTTP, tokenizer and detokenizer before the first token leaves."""
    request_token_s: float
    """The same for each prompt token."""
    queue_share: float
    """How much of the prompts ahead an arriving prompt waits for."""
    clump_share: float
    """Of the largest batch of prompts: how many stay together where all answers are equally long."""
    thin_columns: float
    """Columns at which an expert's matrices are so thin that half of the efficiency is left."""


def work_seconds(shape: Any, c: Any, bandwidth: Any, work: Any, padding: Any = 0) -> tuple[Any, ...]:
    """(matrices, experts, attention, kv, head, elementwise, overhead) of one stage, in seconds, without what crosses.

    `shape`: a StageShape, `c`: EngineConstants, `work`: a StepWork (or the same names as arrays), `padding`: rows that
    a graph computes beside those of the work (`graph_padding`).
    """
    own = work.prefill_tokens * shape.prefill_share + work.decodes
    tokens = own + padding
    p = c.corner
    matrices = _corner(
        shape.dense_bytes / (bandwidth * c.weight_efficiency),
        shape.dense_flops * tokens / (shape.dense_rate * c.matrix_efficiency), p,
    )  # fmt: skip
    experts = _expert_seconds(shape, c, bandwidth, own * shared_ratio(work) if work.shared_rows else tokens)
    pairs = work.prefill_pairs * shape.pair_flops + work.prefill_window_pairs * shape.window_pair_flops
    attention = pairs * shape.prefill_share / (shape.attention_rate * c.attention_efficiency)
    context = (work.decode_context + work.prefill_context) * shape.context_bytes
    window = (work.decode_window_context + work.prefill_context) * shape.window_context_bytes
    kv = (context + window + work.decodes * shape.state_bytes) / (bandwidth * c.kv_efficiency)
    head = _corner(
        shape.head_bytes / (bandwidth * c.weight_efficiency),
        shape.head_flops * work.logits / (shape.head_rate * c.matrix_efficiency), p,
    )  # fmt: skip
    elementwise = c.hidden_passes * shape.hidden_bytes * tokens / bandwidth
    overhead = (
        c.layer_s * shape.layers + c.expert_layer_s * shape.moe_layers + c.latent_layer_s * shape.latent_layers
        + c.linear_layer_s * shape.linear_layers + c.sequence_s * (work.decodes + work.prefill_seqs)
    )  # fmt: skip
    return matrices, experts, attention, kv, head, elementwise, overhead


def _expert_seconds(shape: Any, c: Any, bandwidth: Any, tokens: Any) -> Any:
    """Weights of the experts that the tokens touch, E(1 − (1 − k/E)^T) under uniform routing, on the busiest rank.
    `tokens`: of a replica, on average over those that share the experts."""
    seen = tokens * shape.expert_replicas
    touched = 1 - shape.expert_miss**seen
    spread = shape.expert_spread_normal
    busiest = touched + spread * ((touched * (1 - touched) + 1e-12) / shape.experts_here) ** 0.5
    busiest = (busiest + 1 - abs(busiest - 1)) / 2
    expected = seen * (1 - shape.expert_miss) * shape.experts_here + 1e-6  # (token, expert) pairs of the rank
    skew = 1 + spread / expected**0.5
    skew = (skew + 3 - abs(skew - 3)) / 2
    thin = shape.expert_columns / (shape.expert_columns + c.thin_columns)
    return _corner(
        shape.expert_bytes * busiest / (bandwidth * c.expert_efficiency * thin),
        shape.expert_flops * tokens * skew / (shape.expert_rate * c.expert_matrix_efficiency * thin), c.corner,
    )  # fmt: skip


def launch_seconds(shape: Any, c: Any) -> Any:
    """Host time of the launches of a step with prompt tokens."""
    return (
        c.prefill_layer_s * shape.layers + c.prefill_expert_layer_s * shape.moe_layers
        + c.prefill_latent_layer_s * shape.latent_layers + c.prefill_linear_layer_s * shape.linear_layers
    )  # fmt: skip


def not_shorter(seconds: Any, launches: Any, work: Any, graph_tokens: Any = 0) -> Any:
    """A stage's time, at least that of its launches where there are prompt tokens; the corner is round. `graph_tokens`:
    up to so many tokens of a step a graph replays the launches."""
    prefilling = work.prefill_tokens / (work.prefill_tokens + 1)  # 0 without, 1 with prompt tokens
    prefilling = prefilling * (work.prefill_tokens + work.decodes > graph_tokens)
    return (seconds**LAUNCH_CORNER + (launches * prefilling) ** LAUNCH_CORNER) ** (1 / LAUNCH_CORNER)


def graph_padding(rows: float, largest: int) -> float:
    """Rows that a replayed graph computes beside the `rows` of a step: up to the next captured size, of which vLLM has
    1, 2, 4, every 8th below 256 and every 16th from there (its `VllmConfig._set_cudagraph_sizes`). 0 beyond the
    `largest`, where no graph is replayed."""
    if rows > largest or rows <= 0:
        return 0.0
    if rows <= 4:
        return next(size for size in (1, 2, 4) if rows <= size) - rows
    return -rows % (8 if rows <= 248 else 16)


def axis_seconds(axis: Any, c: Any, work: Any, padding: Any = 0) -> Any:
    """What one axis's operations take in a step. `axis`: an AxisCost, `padding`: as in `work_seconds`."""
    small = (axis.small_limit_s + c.reduce_s - abs(axis.small_limit_s - c.reduce_s)) / 2  # the smaller of the two
    prefilling = work.prefill_tokens / (work.prefill_tokens + 1)
    decoding = work.decodes / (work.decodes + 1)
    moved = axis.prefill_token_s * work.prefill_tokens + axis.decode_token_s * work.decodes
    if work.shared_rows and axis.gathered_from:
        moved = moved * gathered_share(axis.gathered_from, work)
    else:
        moved = moved + axis.decode_token_s * padding
    return (
        axis.small_ops * small + axis.both_latency_s
        + axis.prefill_latency_s * prefilling + axis.decode_latency_s * decoding
        + moved + axis.logit_s * work.logits
    )  # fmt: skip


def shared_ratio(work: Any) -> Any:
    """Rows of the mean replica over this one's: what shared experts compute for, where replicas are not alike."""
    return work.shared_rows / max(1, work.prefill_tokens + work.decodes) if work.shared_rows else 1.0


def gathered_share(gathered_from: int, work: Any) -> Any:
    """Of what a rank receives where all are as busy as it is: the mean replica's tokens from each of the others, and
    the busiest sends its own at least once."""
    return max(1 / gathered_from, shared_ratio(work)) if work.shared_rows and gathered_from else 1.0


def _corner(memory: Any, compute: Any, power: Any) -> Any:
    return (memory**power + compute**power) ** (1 / power)


# ---- the fitted file


def classes(engine: str, spec: ModelSpec, version: str = "") -> dict[str, str]:
    """Kind of class → the one that a row is of."""
    dense_bits = spec.quantization.bits if spec.quantization and spec.quantization.covers("attention") else 16
    expert_bits = "none"
    if spec.moe:
        quantised = spec.quantization and spec.quantization.covers("experts")
        expert_bits = str(spec.quantization.bits if quantised and spec.quantization else 16)
    return {
        "engine": engine, "version": f"{engine} {version}", "experts": f"{engine} {expert_bits}",
        "latent": "yes" if spec.mla else "no", "bits": str(dense_bits),
    }  # fmt: skip


def fitted_file() -> Path:
    return data_dir() / "fitted" / "engines.toml"


def fitted_table() -> dict[str, Any]:
    file = fitted_file()
    return _read(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _read(file: Path, mtime_ns: int) -> dict[str, Any]:
    return tomllib.loads(file.read_text(encoding="utf-8"))


@lru_cache(maxsize=512)
def engine_constants(engine: str, spec: ModelSpec | None = None, version: str = "") -> EngineConstants:
    """The constants of an engine for a model's class, as fitted; a class that was not measured has the factor 1.

    Raises ValueError for an engine that is unknown.
    """
    if engine not in ENGINES:
        raise ValueError(f"{engine!r} is no engine that was measured: choose one of {', '.join(ENGINES)}.")
    table = fitted_table()
    mine = classes(engine, spec, version) if spec else {"engine": engine}
    values = {}
    for each in fields(EngineConstants):
        value = float(table["base"][each.name]["value"])
        for kind, name in mine.items():
            value *= float(table.get("factors", {}).get(kind, {}).get(name, {}).get(each.name, 1.0))
        values[each.name] = value
    return EngineConstants(**values)


def error_bands(spec: ModelSpec, device: str, engine: str) -> tuple[float, float]:
    """(TTFT, TPOT) relative errors to expect: of this engine's rows with the model left out, of models of this kind
    where there were some; half as much again for a GPU or a kind of model that no row has."""
    table = fitted_table().get("bands", {})
    kind = "latent" if spec.mla else "experts" if spec.moe else "dense"
    name = f"{engine} {kind}"
    band = table.get(name) or table.get(engine) or table["all"]
    widened = 1.0 if name in table and device in table["gpus"] else 1.5
    return band["ttft"] * widened, band["tpot"] * widened
