"""Sums over the tensor table: parameters and floating-point operations by part.

Layers of one kind are alike, so each kind is summed once and multiplied; a 671-billion-parameter model is
counted in a millisecond. One multiply-add is two operations; norms, softmax and rotations are left out (under
1 % of the whole).
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from labkit.model.shapes import ModelSpec
from labkit.model.tensors import (
    ATTENTION,
    EMBEDDING,
    EXPERTS,
    HEAD,
    NORM,
    PARTS,
    embedding_tensor,
    expert_tensors,
    final_norm_tensor,
    head_tensor,
    layer_common_tensors,
)

ATTENTION_SCORES = "attention_scores"


def _num_moe_layers(spec: ModelSpec) -> int:
    return sum(spec.is_moe_layer(layer) for layer in range(spec.num_layers))


def _layer_parameters(spec: ModelSpec, experts_per_layer: int) -> Counter[str]:
    num_moe = _num_moe_layers(spec)
    total: Counter[str] = Counter()
    for kind, num_layers in spec.layer_kinds(range(spec.num_layers)).items():
        for tensor in layer_common_tensors(spec, *kind):
            total[tensor.part] += num_layers * tensor.num_elements
    if num_moe:
        one = sum(tensor.num_elements for tensor in expert_tensors(spec, 0))
        total[EXPERTS] += num_moe * experts_per_layer * one
    return total


def _with_ends(spec: ModelSpec, total: Counter[str]) -> dict[str, int]:
    total[EMBEDDING] += embedding_tensor(spec).num_elements
    total[NORM] += final_norm_tensor(spec).num_elements
    if not spec.tie_word_embeddings:
        total[HEAD] += head_tensor(spec).num_elements
    return {part: total[part] for part in PARTS if total[part]}


@lru_cache(maxsize=64)
def _cached_parameters(spec: ModelSpec, experts_per_layer: int) -> tuple[tuple[str, int], ...]:
    return tuple(_with_ends(spec, _layer_parameters(spec, experts_per_layer)).items())


def parameters(spec: ModelSpec) -> dict[str, int]:
    """Part → number of parameters; a tied head counts once, under embedding."""
    return dict(_cached_parameters(spec, spec.moe.num_experts if spec.moe else 0))


def active_parameters(spec: ModelSpec) -> dict[str, int]:
    """Part → parameters that one token passes (top_k of the routed experts)."""
    return dict(_cached_parameters(spec, spec.moe.top_k if spec.moe else 0))


def visible_pairs(num_tokens: int, context_tokens: int, window: int | None) -> int:
    """(query, key) pairs of causal attention: new token i sees context + i + 1 keys, at most `window` of
    them.
    """
    first, last = context_tokens + 1, context_tokens + num_tokens
    if num_tokens == 0:
        return 0
    if window is None or last <= window:
        return (first + last) * num_tokens // 2
    growing = max(0, window - first + 1)
    return (first + window) * growing // 2 + (num_tokens - growing) * window


def linear_state_flops(spec: ModelSpec) -> int:
    """Operations of a token in the recurrent states of all linear-attention layers: a matrix [value dim, key dim] a
    head is read with the key, changed by an outer product, and read with the query (Yang et al. 2024, gated delta
    rule in its recurrent form): 3 · 2 a number.
    """
    linear = spec.linear_attention
    return 6 * linear.state_numbers * len(spec.linear_layers) if linear else 0


def flops(spec: ModelSpec, num_tokens: int, context_tokens: int = 0, num_logits: int = 1) -> dict[str, int]:
    """Part → operations for `num_tokens` new tokens of one sequence over `context_tokens` cached ones.

    Matrices cost 2 · parameters · tokens (Kaplan et al. 2020, §2.1); attention scores and their weighted sum
    2 · heads · (key dim + value dim) a visible pair; the head runs for `num_logits` positions only.
    """
    active = active_parameters(spec)
    layers = {
        part: 2 * count * num_tokens for part, count in active.items() if part not in (EMBEDDING, NORM, HEAD)
    }
    value_dim = spec.mla.v_head_dim if spec.mla else spec.head_dim
    per_pair = 2 * spec.num_heads * (spec.head_dim + value_dim)
    pairs = sum(
        visible_pairs(num_tokens, context_tokens, spec.window(layer))
        for layer in range(spec.num_layers)
        if not spec.is_linear_layer(layer)
    )
    layers[ATTENTION_SCORES] = per_pair * pairs + linear_state_flops(spec) * num_tokens
    layers[HEAD] = 2 * spec.hidden_size * spec.vocab_size * num_logits
    return {part: layers[part] for part in (ATTENTION, ATTENTION_SCORES, *PARTS[2:]) if part in layers}
