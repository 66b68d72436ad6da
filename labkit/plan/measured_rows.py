"""Rows of measured servings (the columns of InferenceX as aiconfigurator ships them) as layouts, models and settings.

What a row does not say is taken from how its benchmark is run: InferenceX starts its clients at once, sends ten
requests each, and draws lengths from 0.8 to 1 of the ones named; its servers' settings stand in its public scripts.
Rows of other sources are taken at their word: exact lengths, ten rounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from labkit.layout import Layout, check_layout
from labkit.model.shapes import ModelSpec, Quantization
from labkit.model.spec import load_spec
from labkit.plan.engine_cost import ENGINES, GRAPH_TOKENS
from labkit.plan.hardware import Hardware, load_hardware
from labkit.plan.work import EngineSettings

COLUMNS = (
    "model_path", "system", "backend", "backend_version", "precision", "isl", "osl", "concurrency", "tp_size",
    "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size",
)  # fmt: skip
"""Columns that a prediction needs; others are handed through."""
MODELS = {
    "deepseek-v3": "deepseek-v3", "deepseek-r1": "deepseek-v3", "minimax-m2.5": "minimax-m2.5",
    "qwen3-235b-a22b": "qwen3-235b-a22b", "qwen3.5-397b-a17b": "qwen3.5-397b-a17b", "kimi-k2.5": "kimi-k2.5",
    "llama-3.1-70b": "llama-3.1-70b", "llama-3.3-70b": "llama-3.1-70b", "llama-3.1-8b": "llama-3.1-8b",
    "gpt-oss-120b": "gpt-oss-120b",
}  # fmt: skip
"""Names as checkpoints carry them, without maker, -Instruct and precision → data/models. R1 has V3's shapes."""
BUDGET = {"vllm": 8192, "sglang": 8192, "trtllm": 8192, "labkit": 8192}
"""Tokens of a step by the engines' defaults on GPUs of 80 GB and more."""
_SCRIPTS = {
    ("sglang", "deepseek-v3"): lambda prompt, output, concurrency: 32_768,
    ("sglang", "qwen3.5-397b-a17b"): lambda prompt, output, concurrency: 16_384,
    ("trtllm", "deepseek-v3"): lambda prompt, output, concurrency: prompt + concurrency + 64,
    ("trtllm", "llama-3.1-70b"): lambda prompt, output, concurrency: prompt + output + 200,
    ("trtllm", "gpt-oss-120b"): lambda prompt, output, concurrency: 20_000,
}
"""Tokens of a step in InferenceX's server scripts, of the lengths named: chunked-prefill-size, max_num_tokens."""
_GRAPHS = {("vllm", "gpt-oss-120b"): 2048}
"""max-cudagraph-capture-size in those scripts, where it is not the default."""
ROUNDS, LENGTH_SHARE = 10, 0.9
GPUS_A_NODE = 8
FP8_CACHE = ("llama-3.1-70b", "deepseek-v3")
"""Models whose TensorRT-LLM servers were started with an FP8 cache (InferenceX, benchmarks/*_h200_trt_slurm.sh)."""
PRECISIONS = ("", "bf16", "fp8", "fp4", "int4")


class RowError(ValueError):
    """Why a row cannot be predicted, as a sentence."""


@dataclass(frozen=True)
class Row:
    model: str
    spec: ModelSpec
    hardware: Hardware
    layout: Layout
    engine: str
    version: str
    precision: str
    prompt: float
    output: float
    concurrency: float
    settings: EngineSettings
    wait_steps: float
    inferencex: bool
    graph_tokens: int
    """The largest step that the server's graphs cover."""


def read_row(row: Mapping[str, str]) -> Row:
    """A row of the file. Raises RowError (a ValueError) with what is wrong."""
    engine = row["backend"].strip().lower()
    if engine not in ENGINES:
        raise RowError(f"{row['backend']!r} is no engine that was measured: {', '.join(ENGINES)} are.")
    model, precision = _model(row["model_path"]), row["precision"].strip().lower()
    if precision not in PRECISIONS:
        raise RowError(f"precision {row['precision']!r} is unknown: {', '.join(PRECISIONS[1:])} are known.")
    try:
        spec = with_precision(load_spec(model), precision)
    except (FileNotFoundError, ValueError) as error:
        raise RowError(str(error)) from None
    layout = _layout(row, spec)
    prompt, output, concurrency = (_positive(row, name) for name in ("isl", "osl", "concurrency"))
    if concurrency < layout.dp:
        concurrency = float(layout.dp)
    inferencex = "/users/" not in row.get("silicon_data_source", "/users/").lower()
    share = LENGTH_SHARE if inferencex else 1.0
    waits = inferencex and engine == "trtllm" and model == "llama-3.1-70b" and prompt == output and layout.tp < 8
    script = _SCRIPTS.get((engine, model)) if inferencex else None
    budget = int(script(prompt, output, concurrency)) if script else BUDGET[engine]
    settings = EngineSettings(
        max_num_batched_tokens=budget, max_num_seqs=min(budget, max(256, math.ceil(concurrency))),
        kv_cache_dtype="fp8" if inferencex and engine == "trtllm" and model in FP8_CACHE else "auto",
    )  # fmt: skip
    return Row(
        model, spec, _hardware(row["system"], layout), layout, engine, row["backend_version"].strip(), precision,
        prompt * share, max(2.0, output * share), concurrency, settings, 20.0 if waits else 0.0, inferencex,
        (inferencex and _GRAPHS.get((engine, model))) or GRAPH_TOKENS.get(engine, 0),
    )  # fmt: skip


def _model(path: str) -> str:
    name = path.strip().rstrip("/").rpartition("/")[2].lower()
    for ending in ("-fp8", "-fp4", "-nvfp4", "-instruct", "-0528"):
        name = name.removesuffix(ending)
    return MODELS.get(name, name)


def with_precision(spec: ModelSpec, precision: str) -> ModelSpec:
    """The model with weights in another format than its config says: FP8 of a bfloat16 checkpoint."""
    if precision == "fp8" and spec.quantization is None:
        return replace(spec, quantization=Quantization("fp8", 8, (0, 0), 4))
    return spec


def _hardware(system: str, layout: Layout) -> Hardware:
    name = system.strip().lower().removesuffix("_sxm").replace("_", "-")
    try:
        return load_hardware(f"{GPUS_A_NODE}x{name}")
    except ValueError as error:
        raise RowError(str(error)) from None


def _positive(row: Mapping[str, str], name: str) -> float:
    try:
        value = float(row[name])
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise RowError(f"{name} is {row[name]!r}: give a number above 0.")
    return value


def _degree(row: Mapping[str, str], name: str) -> int:
    text = row[name].strip()
    if not text or text.lower() == "nan":
        return 1
    value = _positive(row, name)
    if value != int(value):
        raise RowError(f"{name} is {text}: a degree is a whole number.")
    return int(value)


def _layout(row: Mapping[str, str], spec: ModelSpec) -> Layout:
    """tp × pp × attention-DP; experts over all ranks where they are shared out at all. Experts that are cut and shared
    out at once hold the same bytes as ones that are cut only, and are taken as such; where a cut would break a
    quantisation group, engines share whole experts out, and so it is taken."""
    names = ("tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    tp, pp, dp, moe_tp, moe_ep = (_degree(row, name) for name in names)
    world = tp * pp * dp
    if world > GPUS_A_NODE:
        raise RowError(f"tp {tp} × pp {pp} × attention-DP {dp} is {world} GPUs, and {row['system']} has {GPUS_A_NODE}.")
    if spec.moe and moe_tp * moe_ep != tp * dp:
        raise RowError(
            f"experts over {moe_tp} × {moe_ep} ranks and attention over {tp} × {dp} contradict each other: both must "
            "count the same GPUs."
        )
    shared = bool(spec.moe) and (dp > 1 or (moe_ep > 1 and moe_tp == 1))
    layout = Layout(dp=dp, pp=pp, tp=tp, ep=tp * dp if shared else 1)
    reasons = check_layout(layout, spec).model_reasons
    if reasons and spec.moe and layout.ep == 1 and tp > 1:  # a cut that would break a group: then they are whole
        layout = replace(layout, ep=tp * dp)
        reasons = check_layout(layout, spec).model_reasons
    if reasons:
        raise RowError(" ".join(reasons))
    return layout
