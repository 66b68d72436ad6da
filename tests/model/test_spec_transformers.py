"""Against transformers, whose files we read: the same tensor names and shapes, and the same number of
parameters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from labkit.model.spec import list_models, load_spec, model_dir
from labkit.model.tensors import all_tensors

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BASE = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 151,
    "max_position_embeddings": 128,
}
SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"head_dim": 12, "rope_parameters": SCALING}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {"head_dim": 12, "sliding_window": 16}),
    "qwen2-tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 12}),
    "qwen3-biases": ("Qwen3Config", {"head_dim": 12, "attention_bias": True}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "head_dim": 12, "num_experts": 4, "mlp_only_layers": [1]}),
    "qwen3_moe-step": (
        "Qwen3MoeConfig",
        {**EXPERTS, "head_dim": 12, "num_experts": 4, "decoder_sparse_step": 2},
    ),
    "qwen2_moe": ("Qwen2MoeConfig", {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **EXPERTS,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 10,
            "q_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
        },
    ),
}


def saved_tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import safe_open

    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found.update({name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()})  # noqa: SIM118
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_lists_exactly_the_tensors_of_a_saved_checkpoint(family: str, tmp_path: Path) -> None:
    config_class, changes = FAMILIES[family]
    config = getattr(transformers, config_class)(**{**BASE, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    spec = load_spec(tmp_path)
    assert {tensor.name: tensor.shape for tensor in all_tensors(spec)} == saved_tensors(tmp_path)
    buffers = sum(
        tensor.num_elements for tensor in all_tensors(spec) if tensor.name.endswith("correction_bias")
    )
    assert spec.num_parameters - buffers == sum(p.numel() for p in model.parameters())
    assert spec.window(0) == changes.get("sliding_window")
    assert spec.rope.theta == config.rope_parameters["rope_theta"]


def published_config(name: str) -> Any:
    """transformers has no kimi_k2: it is a DeepSeek-V3 with other numbers, and its makers run it as one."""
    keys = json.loads((model_dir(name) / "config.json").read_text())
    if keys["model_type"] == "kimi_k2":
        return transformers.DeepseekV3Config(**{**keys, "model_type": "deepseek_v3"})
    return transformers.AutoConfig.from_pretrained(model_dir(name))


@pytest.mark.parametrize("name", list_models())
def test_shipped_configs_build_the_same_model_in_transformers(name: str) -> None:
    """On the meta device: shapes without memory."""
    config = published_config(name)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    spec = load_spec(name)
    moe_layers = sum(spec.is_moe_layer(layer) for layer in range(spec.num_layers))
    biases = moe_layers * spec.moe.num_experts if spec.moe and spec.moe.router_bias else 0
    assert spec.num_parameters - biases == sum(p.numel() for p in model.parameters())
