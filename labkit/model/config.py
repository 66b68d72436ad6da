"""From a Hugging Face config.json to a `ModelSpec`: every key is either read, or known not to matter for
shapes.

Nothing that changes a result has a silent default: a missing RoPE base, an unknown family or an unknown
quantisation is a `ConfigError` whose sentence names the key, what is allowed and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit.model.config_families import FAMILIES
from labkit.model.config_values import MOST_LAYERS, Config, ConfigError, count_or, need, need_count, need_number
from labkit.model.quantized import read_quantization
from labkit.model.shapes import DTYPE_BYTES, ModelSpec, Rope, RopeScaling

__all__ = ["Config", "ConfigError", "need", "need_count", "parse_config"]


# ---- rotary embedding


def _rope_sections(config: Config) -> list[Config]:
    """Where rotary settings may stand: `rope_parameters` (newer), `rope_scaling` (older), the config."""
    sections = [config.get("rope_parameters"), config.get("rope_scaling"), config]
    return [section for section in sections if isinstance(section, Mapping)]


def _rope_theta(config: Config) -> float:
    for section in _rope_sections(config):
        if section.get("rope_theta") is not None:
            return need_number(section, "rope_theta")
    raise ConfigError(
        "config.json gives no RoPE base: neither rope_theta nor rope_parameters.rope_theta is there. A "
        "guessed base gives wrong text without any error: write it out (10000.0 for Llama 1 and 2)."
    )


def _rope_share(config: Config) -> float:
    """`rotary_dim` (numbers of a head) or `partial_rotary_factor`; all of a head where neither is there."""
    if config.get("rotary_dim") and config.get("head_dim"):
        return need_count(config, "rotary_dim") / need_count(config, "head_dim")
    found = (section for section in _rope_sections(config) if section.get("partial_rotary_factor"))
    section = next(found, None)
    return 1.0 if section is None else need_number(section, "partial_rotary_factor")


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
    trained = count_or(section, "original_max_position_embeddings") or need_count(config, "max_position_embeddings")
    if kind != "llama3":
        return RopeScaling(kind, need_number(section, "factor"), original_max_positions=trained)
    return RopeScaling(
        kind,
        factor=need_number(section, "factor"),
        low_freq_factor=need_number(section, "low_freq_factor"),
        high_freq_factor=need_number(section, "high_freq_factor"),
        original_max_positions=need_count(section, "original_max_position_embeddings"),
    )


# ---- what every family has


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(each, int) for each in ids):
        raise ConfigError(f"config.json: {value!r} are no token ids; bos_token_id and eos_token_id are whole numbers.")
    return ids


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
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return {}
    window = need_count(config, "sliding_window")
    kinds = config.get("layer_types")
    if kinds:
        full = frozenset(i for i, kind in enumerate(kinds) if kind == "full_attention")
    elif config.get("use_sliding_window"):  # Qwen: the first max_window_layers see everything
        full = frozenset(range(min(num_layers, count_or(config, "max_window_layers"))))
    else:
        full = frozenset()
    return {"sliding_window": window, "full_attention_layers": full}


def _dtype(config: Config) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ConfigError(f"dtype {name!r} is unknown; known are {', '.join(DTYPE_BYTES)}.")
    return name


# a model without a dense layer may leave out the width of one
_WIDTH_KEYS = ("intermediate_size", "moe_intermediate_size")


def _common(config: Config) -> dict[str, Any]:
    hidden, num_heads = need_count(config, "hidden_size"), need_count(config, "num_attention_heads")
    num_layers = need_count(config, "num_hidden_layers", most=MOST_LAYERS)
    return {
        "family": config["model_type"],
        "num_layers": num_layers,
        "hidden_size": hidden,
        "num_heads": num_heads,
        "num_kv_heads": _num_kv_heads(config, num_heads),
        "head_dim": _head_dim(config, hidden, num_heads),
        "intermediate_size": need_count(config, *_WIDTH_KEYS),
        "vocab_size": need_count(config, "vocab_size"),
        "rope": Rope(_rope_theta(config), _rope_scaling(config), _rope_share(config)),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "norm_eps": need_number(config, "rms_norm_eps"),
        "max_positions": need_count(config, "max_position_embeddings"),
        "quantization": read_quantization(config),
        "dtype": _dtype(config),
        "bos_token_ids": _token_ids(config.get("bos_token_id")),
        "eos_token_ids": _token_ids(config.get("eos_token_id")),
        **_windows(config, num_layers),
    }


def _text_part(config: Config) -> Config:
    """A model of pictures and text keeps its text part in `text_config`; that is what is counted here."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return config
    outer = {key: config[key] for key in ("quantization_config", "tie_word_embeddings") if key in config}
    return {**outer, **inner}


def parse_config(config: Config, name: str) -> ModelSpec:
    """A decoded config.json as a `ModelSpec`. Raises ConfigError with a sentence that names the model."""
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        config = _text_part(config)
        family = str(config.get("model_type"))
    if family not in FAMILIES:
        raise ConfigError(
            f"{name}: model_type {family!r} is unknown; known families are {', '.join(FAMILIES)}."
        )
    try:
        return ModelSpec(name=name, **{**_common(config), **FAMILIES[family](config)})
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
    except (TypeError, AttributeError, KeyError) as error:  # a text where a number should be, a number for a list …
        raise ConfigError(
            f"{name}: config.json has a value of another kind than its family's own ({type(error).__name__}: {error}): "
            "compare it with the published one."
        ) from error
