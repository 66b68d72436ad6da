"""The smallest config that reads as a model, to change one key of."""

from __future__ import annotations

from typing import Any

from labkit.model.spec import ModelSpec, parse_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 151,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
}


def read(**changes: Any) -> ModelSpec:
    """LLAMA with keys changed, or taken out where the value is None."""
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    return parse_config(config, "tiny")
