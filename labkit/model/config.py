"""From a Hugging Face config.json to a `ModelSpec`: every key is either read, or known not to matter for
shapes.

Nothing that changes a result has a silent default: a missing RoPE base, an unknown family or an unknown
quantisation is a `ConfigError` whose sentence names the key, what is allowed and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from labkit.model.quantized import read_quantization
from labkit.model.shapes import DTYPE_BYTES, MlaSpec, ModelSpec, MoeSpec, Rope, RopeScaling


class ConfigError(ValueError):
    """The config cannot be read as a model; the message says which key and what to do."""


Config = Mapping[str, Any]


def need(config: Config, *keys: str) -> Any:
    """The first of `keys` that the config has (and is not null)."""
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise ConfigError(
        f"config.json lacks {' or '.join(keys)}; add it as the checkpoint's authors published it."
    )


def need_count(config: Config, *keys: str) -> int:
    value = need(config, *keys)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {keys[0]} is {value!r}; it must be a whole number from 1 on.")
    return value


# ---- rotary embedding


def _rope_sections(config: Config) -> list[Config]:
    """Where rotary settings may stand: `rope_parameters` (newer), `rope_scaling` (older), the config."""
    sections = [config.get("rope_parameters"), config.get("rope_scaling"), config]
    return [section for section in sections if isinstance(section, Mapping)]


def _rope_theta(config: Config) -> float:
    for section in _rope_sections(config):
        if section.get("rope_theta") is not None:
            return float(section["rope_theta"])
    raise ConfigError(
        "config.json gives no RoPE base: neither rope_theta nor rope_parameters.rope_theta is there. A "
        "guessed base gives wrong text without any error: write it out (10000.0 for Llama 1 and 2)."
    )


def _rope_scaling(config: Config) -> RopeScaling | None:
    for section in _rope_sections(config)[:-1]:
        kind = section.get("rope_type", section.get("type"))
        if kind not in (None, "default"):
            return _read_scaling(kind, section, config)
    return None


def _read_scaling(kind: str, section: Config, config: Config) -> RopeScaling:
    if kind not in ("llama3", "linear", "yarn", "dynamic"):
        raise ConfigError(
            f"RoPE scaling {kind!r} is unknown; known are default, llama3, linear, dynamic and yarn."
        )
    trained = section.get("original_max_position_embeddings") or need_count(config, "max_position_embeddings")
    if kind != "llama3":
        return RopeScaling(kind, float(need(section, "factor")), original_max_positions=trained)
    return RopeScaling(
        kind,
        factor=float(need(section, "factor")),
        low_freq_factor=float(need(section, "low_freq_factor")),
        high_freq_factor=float(need(section, "high_freq_factor")),
        original_max_positions=need_count(section, "original_max_position_embeddings"),
    )


# ---- what every family has


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _head_dim(config: Config, hidden: int, num_heads: int) -> int:
    if config.get("head_dim"):
        return need_count(config, "head_dim")
    if config["model_type"] == "qwen3":
        return 128  # the family's documented default is not hidden ÷ heads
    if hidden % num_heads:
        raise ConfigError(
            f"config.json has no head_dim, and hidden_size {hidden} ÷ {num_heads} heads = "
            f"{hidden / num_heads:.2f} is not whole; write head_dim out."
        )
    return hidden // num_heads


def _num_kv_heads(config: Config, num_heads: int) -> int:
    if config["model_type"] == "llama" and config.get("num_key_value_heads") is None:
        return num_heads  # Llama 1 and 2 were published without the key: every query head has its own KV head
    return need_count(config, "num_key_value_heads")


def _windows(config: Config, num_layers: int) -> dict[str, Any]:
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return {}
    kinds = config.get("layer_types")
    if kinds:
        full = frozenset(i for i, kind in enumerate(kinds) if kind == "full_attention")
    elif config.get("use_sliding_window"):  # Qwen: the first max_window_layers see everything
        full = frozenset(range(min(num_layers, config.get("max_window_layers", 0))))
    else:
        full = frozenset()
    return {"sliding_window": window, "full_attention_layers": full}


def _dtype(config: Config) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ConfigError(f"dtype {name!r} is unknown; known are {', '.join(DTYPE_BYTES)}.")
    return name


def _common(config: Config) -> dict[str, Any]:
    hidden, num_heads = need_count(config, "hidden_size"), need_count(config, "num_attention_heads")
    num_layers = need_count(config, "num_hidden_layers")
    return {
        "family": config["model_type"],
        "num_layers": num_layers,
        "hidden_size": hidden,
        "num_heads": num_heads,
        "num_kv_heads": _num_kv_heads(config, num_heads),
        "head_dim": _head_dim(config, hidden, num_heads),
        "intermediate_size": need_count(config, "intermediate_size"),
        "vocab_size": need_count(config, "vocab_size"),
        "rope": Rope(_rope_theta(config), _rope_scaling(config)),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "norm_eps": float(need(config, "rms_norm_eps")),
        "max_positions": need_count(config, "max_position_embeddings"),
        "quantization": read_quantization(config),
        "dtype": _dtype(config),
        "bos_token_ids": _token_ids(config.get("bos_token_id")),
        "eos_token_ids": _token_ids(config.get("eos_token_id")),
        **_windows(config, num_layers),
    }


# ---- families


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
    listed, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
    num_layers = need_count(config, "num_hidden_layers")
    return frozenset(i for i in range(num_layers) if i in listed or (i + 1) % step)


def _need_switch(config: Config, key: str) -> bool:
    value = need(config, key)
    if not isinstance(value, bool):
        raise ConfigError(f"config.json: {key} is {value!r}; it must be true or false.")
    return value


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
        norm_top_k=_need_switch(config, "norm_topk_prob"),
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


def _deepseek_v3(config: Config) -> dict[str, Any]:
    if config.get("attention_bias"):
        raise ConfigError("deepseek_v3 with attention_bias true is not supported; no published model has it.")
    mla = MlaSpec(
        kv_lora_rank=need_count(config, "kv_lora_rank"),
        qk_nope_head_dim=need_count(config, "qk_nope_head_dim"),
        qk_rope_head_dim=need_count(config, "qk_rope_head_dim"),
        v_head_dim=need_count(config, "v_head_dim"),
        q_lora_rank=config.get("q_lora_rank"),
    )
    width = need_count(config, "moe_intermediate_size")
    num_layers, step = need_count(config, "num_hidden_layers"), config.get("moe_layer_freq", 1)
    first = config.get("first_k_dense_replace", 0)
    moe = MoeSpec(
        num_experts=need_count(config, "n_routed_experts", "num_local_experts"),
        top_k=need_count(config, "num_experts_per_tok"),
        intermediate_size=width,
        shared_intermediate_size=width * (config.get("n_shared_experts") or 0),
        router_bias=config.get("topk_method", "noaux_tc") == "noaux_tc",
        norm_top_k=_need_switch(config, "norm_topk_prob"),
        dense_layers=frozenset(i for i in range(num_layers) if i < first or i % step),
    )
    head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    num_heads = need_count(config, "num_attention_heads")
    return {"mla": mla, "moe": moe, "head_dim": head_dim, "num_kv_heads": num_heads}


FAMILIES: dict[str, Callable[[Config], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "qwen2_moe": _qwen2_moe,
    "deepseek_v3": _deepseek_v3,
}


def parse_config(config: Config, name: str) -> ModelSpec:
    """A decoded config.json as a `ModelSpec`. Raises ConfigError with a sentence that names the model."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"{name}: model_type {family!r} is unknown; known families are {', '.join(FAMILIES)}."
        )
    try:
        return ModelSpec(name=name, **{**_common(config), **FAMILIES[family](config)})
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
