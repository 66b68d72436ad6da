"""Reading a config.json: every form that families use, and a sentence for what is missing or unknown."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_config import read

from labkit.model.spec import ConfigError, Quantization


def test_the_rope_base_is_read_in_either_form() -> None:
    assert read().rope.theta == 10000.0
    newer = read(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert newer.rope.theta == 5e5 and newer.rope.scaling is None


def test_a_missing_rope_base_is_an_error_that_names_both_keys() -> None:
    with pytest.raises(ConfigError, match="neither rope_theta nor rope_parameters.rope_theta"):
        read(rope_theta=None)
    with pytest.raises(ConfigError, match="no RoPE base"):
        read(rope_theta=None, rope_parameters={"rope_type": "default"})


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_llama3_scaling_is_read_in_either_form(key: str) -> None:
    section = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaling = read(**{key: section}).rope.scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor, scaling.original_max_positions) == ("llama3", 32.0, 8192)
    del section["low_freq_factor"]
    with pytest.raises(ConfigError, match="lacks low_freq_factor"):
        read(**{key: section})


def test_unknown_rope_scaling_is_refused() -> None:
    with pytest.raises(ConfigError, match="'spiral' is unknown; known are"):
        read(rope_scaling={"type": "spiral", "factor": 2.0})


def test_head_dim_is_the_configs_own() -> None:
    assert read(head_dim=128).head_dim == 128
    assert read().head_dim == 16
    with pytest.raises(ConfigError, match="64 ÷ 6 heads = 10.67 is not whole"):
        read(num_attention_heads=6)


def test_llama_without_kv_heads_has_as_many_as_query_heads() -> None:
    assert read(num_key_value_heads=None).num_kv_heads == 4
    with pytest.raises(ConfigError, match="lacks num_key_value_heads"):
        read(model_type="mistral", num_key_value_heads=None)
    with pytest.raises(ConfigError, match="tiny: 4 query heads cannot share 3 KV heads"):
        read(num_key_value_heads=3)


@pytest.mark.parametrize(
    ("config", "biases"),
    [
        ({}, (False, False, False)),
        ({"attention_bias": True}, (True, True, False)),
        ({"mlp_bias": True}, (False, False, True)),
        ({"model_type": "qwen2"}, (True, False, False)),
        ({"model_type": "qwen3", "head_dim": 16}, (False, False, False)),
        ({"model_type": "mistral"}, (False, False, False)),
    ],
)
def test_biases_follow_the_family(config: dict[str, Any], biases: tuple[bool, bool, bool]) -> None:
    spec = read(**config)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias) == biases


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 8}, [8, 8]),
        ({"model_type": "mistral", "sliding_window": None}, [None, None]),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False}, [None, None]),
        (
            {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
            [None, 8],
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            [8, None],
        ),
    ],
)
def test_sliding_windows_are_on_where_the_family_has_them(
    config: dict[str, Any], windows: list[int | None]
) -> None:
    spec = read(**config)
    assert [spec.window(layer) for layer in range(2)] == windows


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, Quantization("gptq", 4, (1, 128))),
        ({"quant_method": "awq", "bits": 4, "group_size": -1}, Quantization("awq", 4, (1, 0))),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, Quantization("fp8", 8, (128, 128), 4)),
        ({"quant_method": "fp8"}, Quantization("fp8", 8, (0, 0), 4)),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 32}}},
            },
            Quantization("compressed-tensors", 4, (1, 32)),
        ),
    ],
)
def test_quantisation_is_read(section: dict[str, Any], expected: Quantization) -> None:
    assert read(quantization_config=section).quantization == expected


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"quant_method": "mystery"}, "quantisation 'mystery' is unknown"),
        ({"quant_method": "gptq", "bits": 4}, "whole numbers for bits and group_size"),
        ({"quant_method": "compressed-tensors"}, "no config_groups"),
    ],
)
def test_quantisation_that_cannot_be_read_is_refused(section: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read(quantization_config=section)


def test_quantised_bytes_count_weights_and_scales() -> None:
    assert Quantization("gptq", 4, (1, 128)).num_bytes((256, 1024)) == 256 * 1024 // 2 + 256 * 8 * 2
    assert Quantization("fp8", 8, (128, 128), 4).num_bytes((576, 512)) == 576 * 512 + 5 * 4 * 4
    assert Quantization("fp8", 8, (0, 0), 4).num_bytes((10, 10)) == 104


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gpt9"}, "model_type 'gpt9' is unknown; known families are llama"),
        ({"hidden_size": None}, "tiny: config.json lacks hidden_size"),
        ({"num_hidden_layers": 0}, "must be a whole number from 1 to 4,096"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"torch_dtype": "int3"}, "dtype 'int3' is unknown"),
    ],
)
def test_what_cannot_be_read_says_which_key(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read(**changes)


def test_token_ids_come_as_one_or_as_many() -> None:
    assert read(eos_token_id=2).eos_token_ids == (2,)
    assert read(eos_token_id=[2, 3]).eos_token_ids == (2, 3)
    assert read().eos_token_ids == ()
