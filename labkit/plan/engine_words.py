"""How an engine is set, in that engine's words: `EngineSettings` as flags, and for TensorRT-LLM as options of its YAML.

The settings are vLLM's; what another engine counts differently is said in a note beside the flag. vLLM counts sequences
and tokens of a step per replica, SGLang under attention data parallelism over all of them together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from labkit.layout import Layout
from labkit.plan.work import EngineSettings
from labkit.said import say

KV_TYPES = {
    "vllm": {"fp8": "fp8"},
    "sglang": {"fp8": "fp8_e4m3"},
    "trtllm": {"fp8": "fp8"},
}
"""What `kv_cache_dtype` is called, beside auto."""


@dataclass
class SettingWords:
    flags: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def setting_words(engine: str, settings: EngineSettings, layout: Layout) -> SettingWords:
    """Raises ValueError with a sentence for a kind of KV cache that the engine has no word for."""
    words = {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm}[engine](settings, layout)
    if settings.policy != "vllm":
        words.notes.append(say(
            "The plan reckoned with the admission policy '{policy}'; no production engine reserves for an answer, so "
            "expect preemptions where KV is short.", policy=settings.policy,
        ))  # fmt: skip
    return words


def _kv_type(engine: str, settings: EngineSettings) -> str:
    """Empty: the engine's own choice."""
    if settings.kv_cache_dtype == "auto":
        return ""
    known = KV_TYPES[engine]
    if settings.kv_cache_dtype not in known:
        raise ValueError(say(
            "kv_cache_dtype '{dtype}' has no word in {engine}'s commands here: give auto or {known}.",
            dtype=settings.kv_cache_dtype, engine=engine, known=", ".join(known),
        ))  # fmt: skip
    return known[settings.kv_cache_dtype]


def _vllm(settings: EngineSettings, layout: Layout) -> SettingWords:
    flags = [
        *("--max-num-seqs", str(settings.max_num_seqs)),
        *("--max-num-batched-tokens", str(settings.max_num_batched_tokens)),
        *("--gpu-memory-utilization", f"{settings.gpu_memory_utilization:g}"),
    ]
    if settings.max_model_len is not None:
        flags += ["--max-model-len", str(settings.max_model_len)]
    if kv := _kv_type("vllm", settings):
        flags += ["--kv-cache-dtype", kv]
    if settings.block_size != 16:
        flags += ["--block-size", str(settings.block_size)]
    if not settings.enable_prefix_caching:
        flags.append("--no-enable-prefix-caching")
    if not settings.cuda_graphs:
        flags.append("--enforce-eager")
    return SettingWords(flags)


def _sglang(settings: EngineSettings, layout: Layout) -> SettingWords:
    schedulers = layout.dp if layout.attention_dp else 1
    flags = [
        *("--max-running-requests", str(settings.max_num_seqs * schedulers)),
        *("--chunked-prefill-size", str(settings.max_num_batched_tokens * schedulers)),
        *("--mem-fraction-static", f"{settings.gpu_memory_utilization:g}"),
    ]
    if settings.max_model_len is not None:
        flags += ["--context-length", str(settings.max_model_len)]
    if kv := _kv_type("sglang", settings):
        flags += ["--kv-cache-dtype", kv]
    if not settings.enable_prefix_caching:
        flags.append("--disable-radix-cache")
    if not settings.cuda_graphs:
        flags += ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]
    note = say(
        "--mem-fraction-static is the share for weights and KV alone: activations and graphs come on top, so where it "
        "runs out of memory take a smaller one than vLLM's --gpu-memory-utilization."
    )
    return SettingWords(flags, notes=[note])


def _trtllm(settings: EngineSettings, layout: Layout) -> SettingWords:
    flags = [
        *("--max_batch_size", str(settings.max_num_seqs)),
        *("--max_num_tokens", str(settings.max_num_batched_tokens)),
    ]
    if settings.max_model_len is not None:
        flags += ["--max_seq_len", str(settings.max_model_len)]
    cache: dict[str, Any] = {
        "free_gpu_memory_fraction": settings.gpu_memory_utilization,
        "enable_block_reuse": settings.enable_prefix_caching,
    }
    if kv := _kv_type("trtllm", settings):
        cache["dtype"] = kv
    options: dict[str, Any] = {"enable_chunked_prefill": True, "kv_cache_config": cache}
    if not settings.cuda_graphs:
        options["cuda_graph_config"] = None
    note = say(
        "free_gpu_memory_fraction is a share of what weights and activations leave, not of the whole memory: at the "
        "same number TensorRT-LLM keeps more KV than vLLM."
    )
    return SettingWords(flags, options, [note])
