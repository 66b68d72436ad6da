"""Tiny random checkpoints of every family, saved by transformers, with what transformers makes of them.

Every parameter is drawn anew (also biases and the scales of norms, which start at 0 and 1), so that one left
out, or added twice, shows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from labkit.model.spec import ModelSpec, parse_config

SMALL = {"vocab_size": 151, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "decoder_sparse_step": 1, "norm_topk_prob": False}
"""What transformers writes into every config, and the list of layouts needs to read one."""
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied-llama3-rope": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "llama-untied-biases": (
        "Llama",
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2-qkv-bias": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
    "qwen3-qk-norm-own-head-dim": (
        "Qwen3",
        {"tie_word_embeddings": False, "hidden_size": 80, "head_dim": 32},
    ),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral-window": ("Mistral", {"sliding_window": 20, "num_key_value_heads": 1}),
}

MOE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3-moe-dense-layer": (
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16,
         "num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "qwen3-moe-unnormalised": (
        "Qwen3Moe",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16,
         "decoder_sparse_step": 2, "norm_topk_prob": False},
    ),
    "qwen2-moe-shared": (
        "Qwen2Moe",
        {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "shared_expert_intermediate_size": 48, "num_key_value_heads": 2},
    ),
}  # fmt: skip


@cache
def reference(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def make_checkpoint(folder: Path, family: str, seed: int = 0, **changes: Any) -> Path:
    """Saves the family's tiny model under `folder` and gives its path."""
    import transformers

    name, options = (FAMILIES | MOE_FAMILIES)[family]
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **options, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.15
            parameter.copy_(noise + 1.0 if "norm" in key else noise)
    path = folder / family
    model.save_pretrained(path)
    return path


def tiny_spec(family: str, **changes: Any) -> ModelSpec:
    """As `load_spec` reads the family's tiny model, without making one: what to try is known before a test begins."""
    name, options = (FAMILIES | MOE_FAMILIES)[family]
    model_type = re.sub(r"(?<=\w)(?=[A-Z])", "_", name).lower()
    return parse_config({"model_type": model_type, **DEFAULTS, **SMALL, **options, **changes}, family)


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, SMALL["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


def continuation(folder: Path, prompt: Sequence[int], num_new: int) -> tuple[list[int], torch.Tensor]:
    """transformers' greedy tokens, and the log-probabilities [num_new, vocab_size] behind them."""
    return _continuation(folder, tuple(prompt), num_new)


@cache
@torch.inference_mode()
def _continuation(folder: Path, prompt: tuple[int, ...], num_new: int) -> tuple[list[int], torch.Tensor]:
    model = reference(folder)
    ids = model.generate(
        torch.tensor([list(prompt)]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False, eos_token_id=None,
    )  # fmt: skip
    logits = model(ids).logits[0, len(prompt) - 1 : -1]
    return ids[0, len(prompt) :].tolist(), torch.log_softmax(logits.float(), -1)


def assert_same(folder: Path, seqs: Sequence[Any], tolerance: float = 1e-4) -> None:
    """Each has `prompt`, `tokens` and, a step each, `logprobs` of all tokens: as transformers has them."""
    for seq in seqs:
        what = f"a prompt of {len(seq.prompt)}"
        tokens, logprobs = continuation(folder, seq.prompt, len(seq.tokens))
        assert seq.tokens == tokens, what
        for ours, theirs in zip(seq.logprobs, logprobs, strict=True):
            row = torch.tensor([ours[token] for token in range(len(theirs))])
            assert (row - theirs).abs().max() < tolerance, what
