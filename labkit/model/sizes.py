"""What a checkpoint weighs on disk: every tensor in its own bits, the multi-token-prediction module included.

Published sizes are those of the files; an engine loads less (no draft module unless it speculates), and that is what
`labkit.layout.rank_memory` counts.
"""

from __future__ import annotations

from collections import Counter

from labkit.model.shapes import ModelSpec
from labkit.model.tensors import (
    Tensor,
    embedding_tensor,
    expert_tensors,
    final_norm_tensor,
    head_tensor,
    layer_common_tensors,
)


def tensor_bytes(spec: ModelSpec, tensor: Tensor) -> int:
    quantization = spec.quantization
    if quantization and tensor.linear and quantization.covers(tensor.part):
        return quantization.num_bytes(tensor.shape)
    return tensor.num_elements * spec.dtype_bytes


def weights_by_part(spec: ModelSpec) -> dict[str, int]:
    """Part → bytes of the model proper, all of it in one place."""
    total: Counter[str] = Counter()
    for (moe_layer, linear_layer), times in spec.layer_kinds(range(spec.num_layers)).items():
        for tensor in _layer(spec, moe_layer, linear_layer):
            total[tensor.part] += times * _with_experts(spec, tensor)
    ends = [embedding_tensor(spec), final_norm_tensor(spec)]
    for tensor in ends if spec.tie_word_embeddings else [*ends, head_tensor(spec)]:
        total[tensor.part] += tensor_bytes(spec, tensor)
    return dict(total)


def _layer(spec: ModelSpec, moe_layer: bool, linear_layer: bool) -> list[Tensor]:
    experts = expert_tensors(spec, 0) if moe_layer else []
    return [*layer_common_tensors(spec, moe_layer, linear_layer), *experts]


def _with_experts(spec: ModelSpec, tensor: Tensor) -> int:
    times = spec.moe.num_experts if spec.moe and tensor.expert is not None else 1
    return times * tensor_bytes(spec, tensor)


def draft_bytes(spec: ModelSpec) -> int:
    """The module that proposes further tokens: a layer of the last kind each, and one matrix that joins hidden state
    and embedding (DeepSeek-V3 report, 2.2). DeepSeek's files repeat embedding and head there; Qwen's share them.
    """
    if not spec.num_draft_layers:
        return 0
    layer = sum(_with_experts(spec, tensor) for tensor in _layer(spec, spec.moe is not None, False))
    joined = (2 * spec.hidden_size * spec.hidden_size + 3 * spec.hidden_size) * spec.dtype_bytes
    copies = 2 * spec.vocab_size * spec.hidden_size * spec.dtype_bytes if spec.family == "deepseek_v3" else 0
    return spec.num_draft_layers * (layer + joined + copies)


def checkpoint_bytes(spec: ModelSpec) -> int:
    """Bytes of all tensors of the published files (of a text model: pictures' towers are not counted)."""
    return sum(weights_by_part(spec).values()) + draft_bytes(spec)
