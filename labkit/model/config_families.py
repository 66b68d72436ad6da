"""What each family's config.json says beside the keys that all have: a function a model_type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.model.config_values import Config, ConfigError, count_or, need_count, need_switch
from labkit.model.shapes import DTYPE_BYTES, LinearAttention, MlaSpec, MoeSpec


def _llama(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bool(config.get("mlp_bias", False))}


def _mistral(config: Config) -> dict[str, Any]:
    return {}


def _qwen2(config: Config) -> dict[str, Any]:
    return {"qkv_bias": True}


def _qwen3(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": True}


def _dense_layers(config: Config) -> frozenset[int]:
    """Qwen's rule: a layer is sparse when it is not listed and its number is a multiple of
    decoder_sparse_step.
    """
    listed, step = config.get("mlp_only_layers") or (), count_or(config, "decoder_sparse_step", 1)
    num_layers = need_count(config, "num_hidden_layers")
    return frozenset(i for i in range(num_layers) if i in listed or (i + 1) % step)


def _mixtral(config: Config) -> dict[str, Any]:
    moe = MoeSpec(
        num_experts=need_count(config, "num_local_experts", "num_experts"),
        top_k=need_count(config, "num_experts_per_tok"),
        intermediate_size=need_count(config, "intermediate_size"),
    )
    return {"moe": moe}


def _qwen_moe(config: Config, shared: int, **extra: Any) -> MoeSpec:
    return MoeSpec(
        num_experts=need_count(config, "num_experts", "num_local_experts"),
        top_k=need_count(config, "num_experts_per_tok"),
        intermediate_size=need_count(config, "moe_intermediate_size"),
        shared_intermediate_size=shared,
        norm_top_k=need_switch(config, "norm_topk_prob"),
        dense_layers=_dense_layers(config),
        **extra,
    )


def _qwen3_moe(config: Config) -> dict[str, Any]:
    return {**_qwen3(config), "moe": _qwen_moe(config, 0)}


def _qwen2_moe(config: Config) -> dict[str, Any]:
    shared = need_count(config, "shared_expert_intermediate_size")
    return {
        "qkv_bias": bool(config.get("qkv_bias", True)),
        "moe": _qwen_moe(config, shared, shared_gate=True),
    }


def _minimax_m2(config: Config) -> dict[str, Any]:
    """`qk_norm_type` "per_layer": one norm over all heads of a layer together."""
    if config.get("qk_norm_type", "per_layer") != "per_layer":
        raise ConfigError(f"minimax_m2 with qk_norm_type {config['qk_norm_type']!r} is unknown; it is per_layer.")
    moe = MoeSpec(
        num_experts=need_count(config, "num_local_experts"),
        top_k=need_count(config, "num_experts_per_tok"),
        intermediate_size=need_count(config, "intermediate_size"),
        router_bias=need_switch(config, "use_routing_bias"),
    )
    return {"moe": moe, "qk_norm": (norm := need_switch(config, "use_qk_norm")), "qk_norm_whole": norm}


def _gpt_oss(config: Config) -> dict[str, Any]:
    bias = need_switch(config, "attention_bias")
    moe = MoeSpec(
        num_experts=need_count(config, "num_local_experts"),
        top_k=need_count(config, "num_experts_per_tok", "experts_per_token"),
        intermediate_size=need_count(config, "intermediate_size"),
        bias=True,
    )
    return {"moe": moe, "sinks": True, "qkv_bias": bias, "o_bias": bias}


def _linear_layers(config: Config) -> frozenset[int]:
    kinds, num_layers = config.get("layer_types"), need_count(config, "num_hidden_layers")
    if kinds:
        return frozenset(i for i, kind in enumerate(kinds) if kind == "linear_attention")
    every = need_count(config, "full_attention_interval")
    return frozenset(i for i in range(num_layers) if (i + 1) % every)


def _qwen3_next(config: Config) -> dict[str, Any]:
    """Qwen3-Next and Qwen3.5: most layers are gated delta rule, every fourth is attention with a gate."""
    linear = LinearAttention(
        num_key_heads=need_count(config, "linear_num_key_heads"),
        num_value_heads=need_count(config, "linear_num_value_heads"),
        key_head_dim=need_count(config, "linear_key_head_dim"),
        value_head_dim=need_count(config, "linear_value_head_dim"),
        conv_kernel=need_count(config, "linear_conv_kernel_dim"),
        state_bytes=DTYPE_BYTES[config.get("mamba_ssm_dtype", "float32")],
    )
    shared = need_count(config, "shared_expert_intermediate_size")
    return {
        "qk_norm": True,
        "attention_gate": bool(config.get("attn_output_gate", True)),
        "linear_attention": linear,
        "linear_layers": _linear_layers(config),
        "num_draft_layers": count_or(config, "mtp_num_hidden_layers"),
        "moe": _qwen_moe({"norm_topk_prob": True, **config}, shared, shared_gate=True),
    }


def _deepseek_v3(config: Config) -> dict[str, Any]:
    if config.get("attention_bias"):
        raise ConfigError("deepseek_v3 with attention_bias true is not supported; no published model has it.")
    mla = MlaSpec(
        kv_lora_rank=need_count(config, "kv_lora_rank"),
        qk_nope_head_dim=need_count(config, "qk_nope_head_dim"),
        qk_rope_head_dim=need_count(config, "qk_rope_head_dim"),
        v_head_dim=need_count(config, "v_head_dim"),
        q_lora_rank=count_or(config, "q_lora_rank") or None,
    )
    width = need_count(config, "moe_intermediate_size")
    num_layers, step = need_count(config, "num_hidden_layers"), count_or(config, "moe_layer_freq", 1)
    first = count_or(config, "first_k_dense_replace")
    moe = MoeSpec(
        num_experts=need_count(config, "n_routed_experts", "num_local_experts"),
        top_k=need_count(config, "num_experts_per_tok"),
        intermediate_size=width,
        shared_intermediate_size=width * count_or(config, "n_shared_experts"),
        router_bias=config.get("topk_method", "noaux_tc") == "noaux_tc",
        norm_top_k=need_switch(config, "norm_topk_prob"),
        dense_layers=frozenset(i for i in range(num_layers) if i < first or i % step),
    )
    head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    num_heads = need_count(config, "num_attention_heads")
    draft = count_or(config, "num_nextn_predict_layers")
    return {"mla": mla, "moe": moe, "head_dim": head_dim, "num_kv_heads": num_heads, "num_draft_layers": draft}


FAMILIES: dict[str, Callable[[Config], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "qwen2_moe": _qwen2_moe,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "minimax_m2": _minimax_m2,
    "gpt_oss": _gpt_oss,
    "qwen3_next": _qwen3_next,
    "qwen3_5_moe_text": _qwen3_next,
}
