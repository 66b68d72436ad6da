"""Lesson 08's exercises: KV of a token from a config.json, and what so many blocks mean for so many requests.

Both are held against the planner, on models and GPUs as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from labkit.layout import Layout, kv_bytes_per_token
from labkit.model.spec import load_spec, model_dir
from labkit.plan.hardware import load_hardware
from labkit.plan.memory import memory_plan
from labkit.plan.work import EngineSettings
from labkit.teach.checks import Check, Problem, show_check


def kv_of(config: Mapping[str, Any], tp: int) -> int:
    """The solution: bytes of a token's KV on one rank, two bytes a number."""
    layers = config["num_hidden_layers"]
    if "kv_lora_rank" in config:
        return int(layers * (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * 2)
    heads, size = config["num_attention_heads"], config.get("head_dim")
    kv_heads = config.get("num_key_value_heads", heads)
    return int(layers * 2 * max(1, kv_heads // tp) * (size or config["hidden_size"] // heads) * 2)


def check_kv_of(function: Callable[..., Any]) -> Check:
    """Held against the layouts of the engine, on configs of real models."""
    cases = (
        ("llama-3.1-70b", 1, "eight KV heads on one rank"),
        ("llama-3.1-70b", 4, "two of them on each rank"),
        ("llama-3.1-70b", 16, "fewer KV heads than ranks: each keeps one whole"),
        ("qwen3-32b", 2, "head_dim is not hidden size ÷ heads"),
        ("llama-2-70b", 2, "no head_dim in the config: hidden size ÷ heads"),
        ("deepseek-v3", 8, "one compressed row for all heads, and no rank can have a part of it"),
    )
    problems = []
    for model, tp, why in cases:
        config = json.loads((model_dir(model) / "config.json").read_text(encoding="utf-8"))
        expected = kv_bytes_per_token(Layout(tp=tp), load_spec(model), 0, 2)
        problems.append(Problem((config, tp), expected, why, f"{model}, tp = {tp}"))
    return show_check(function, problems)


def verdict_of(
    kv_blocks: int, block_size: int, dp: int, max_num_seqs: int, num_requests: int, tokens_each: int
) -> tuple[str, int]:
    """The solution: (answer, requests that hold KV at once)."""
    each = -(-tokens_each // block_size)
    most = max(0, kv_blocks - 1) // each * dp
    if not most:
        return "does not fit", 0
    return "fits" if num_requests <= min(most, max_num_seqs * dp) else "will queue", most


def check_verdict_of(function: Callable[..., Any]) -> Check:
    """Held against `labkit.plan.memory`, for models and GPUs as they are."""
    cases = (
        ("llama-3.1-8b", "1xl40s", "tp1", 256, 64, 1280, "few requests: room for all"),
        ("llama-3.1-8b", "1xl40s", "tp1", 256, 400, 1280, "more than hold KV"),
        ("llama-3.1-8b", "1xl40s", "tp1", 16, 64, 1280, "KV has room, the step has not"),
        ("llama-3.1-8b", "4xl40s", "dp4", 256, 400, 1280, "four replicas: four times the room"),
        ("llama-3.1-70b", "4xh200", "tp1", 256, 1, 1280, "weights alone are too much"),
        ("llama-3.1-70b", "4xh200", "tp4", 256, 8, 131071, "a token beyond whole blocks takes one more"),
        ("llama-3.1-70b", "4xa100", "tp2", 256, 1, 16000, "one request is longer than what a replica holds"),
    )
    return show_check(function, [_verdict_case(*case) for case in cases])


def _verdict_case(
    model: str, gpus: str, slug: str, max_num_seqs: int, num_requests: int, tokens_each: int, why: str
) -> Problem:
    layout, hardware = Layout.parse(slug), load_hardware(gpus)
    settings = EngineSettings(max_num_seqs=max_num_seqs)
    plan = memory_plan(layout, load_spec(model), hardware.device.memory_bytes, settings)
    verdict = plan.verdict(num_requests, tokens_each)
    args = (plan.kv_blocks, plan.block_size, layout.dp, max_num_seqs, num_requests, tokens_each)
    shown = f"{model} on {gpus} as {layout}: {', '.join(map(str, args))}"
    return Problem(args, (verdict.answer, verdict.most), why, shown)
