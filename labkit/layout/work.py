"""How much one rank computes and reads in a step: the numerators of time, before any machine is named.

A step passes the stages in series, so what counts for its duration is summed over stages along one path; what
counts for capacity is what a single rank holds. Decode time follows the bytes read, prefill time the
operations.
"""

from __future__ import annotations

from typing import NamedTuple

from labkit.layout.grid import Coords, Layout
from labkit.layout.slices import counted_tensors, kv_bytes_per_token, rank_memory, slice_tensor
from labkit.layout.traffic import StepShape, num_moe_layers, rank_tokens
from labkit.model.counts import linear_state_flops, visible_pairs
from labkit.model.shapes import ModelSpec
from labkit.model.tensors import EMBEDDING, EXPERTS, expert_tensors


class StepWork(NamedTuple):
    """Of one step of one replica. Bytes and operations are of one rank, the largest where they differ."""

    rank_weight_bytes: int
    rank_kv_bytes: int
    step_read_bytes: int
    """Weights and KV read one after the other, over all stages."""
    step_flops: int
    """Operations done one after the other, over all stages."""
    num_replicas: int
    steps_in_flight: int
    expert_columns: int
    """Width of one expert's matrices on a rank (0: no experts): ep keeps them whole, tp makes them thin."""


def path_ranks(layout: Layout) -> list[int]:
    """One rank of each stage: the path of a step."""
    return [layout.rank_of(Coords(0, stage, 0, 0)) for stage in range(layout.pp)]


def touched_experts(num_experts: int, top_k: int, num_tokens: int) -> float:
    """Expected number of distinct experts that `num_tokens` tokens use under uniform routing: E(1 − (1 −
    k/E)^T).
    """
    return num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)


def _expert_share(layout: Layout, spec: ModelSpec, step: StepShape) -> float:
    """Fraction of a rank's expert bytes that a step reads. Under attention-DP all replicas' tokens reach
    them.
    """
    if spec.moe is None:
        return 0.0
    tokens = step.num_tokens * (layout.dp if layout.attention_dp else 1)
    return touched_experts(spec.moe.num_experts, spec.moe.top_k, tokens) / spec.moe.num_experts


def _read_bytes(layout: Layout, spec: ModelSpec, step: StepShape, dtype_bytes: int) -> int:
    total = 0.0
    for rank in path_ranks(layout):
        memory = rank_memory(layout, spec, rank, dtype_bytes)
        experts = memory.pop(EXPERTS, 0) * _expert_share(layout, spec, step)
        if not (spec.tie_word_embeddings and layout.pp == 1):  # a tied embedding is read whole, as the head
            memory.pop(EMBEDDING, None)
        kv = step.decode_seqs * step.context_tokens * kv_bytes_per_token(layout, spec, rank, dtype_bytes)
        total += sum(memory.values()) + experts + kv
    return round(total)


def _linear_flops(layout: Layout, spec: ModelSpec, step: StepShape) -> int:
    """Projections and MLPs along the path, from the slices the ranks hold; routed experts apart."""
    tokens = rank_tokens(layout, step)
    held = sum(
        times * slice_tensor(layout, spec, rank, tensor).num_elements
        for rank in path_ranks(layout)
        for tensor, times in counted_tensors(layout, spec, rank)
        if tensor.linear and tensor.part != EXPERTS
    )
    return 2 * tokens * held


def _expert_flops(layout: Layout, spec: ModelSpec, step: StepShape) -> int:
    if spec.moe is None:
        return 0
    one = sum(tensor.num_elements for tensor in expert_tensors(spec, 0))
    whole = 2 * rank_tokens(layout, step) * spec.moe.top_k * one * num_moe_layers(spec)
    return whole // layout.tp  # cut by columns, or a tp-th of the tokens' experts on average


def _score_flops(layout: Layout, spec: ModelSpec, step: StepShape) -> int:
    value_dim = spec.mla.v_head_dim if spec.mla else spec.head_dim
    prefill = decode = 0
    for layer in range(spec.num_layers):
        if spec.is_linear_layer(layer):
            continue
        window = spec.window(layer)
        prefill += visible_pairs(step.prefill_tokens, 0, window)
        decode += step.decode_seqs * visible_pairs(1, step.context_tokens, window)
    pairs = prefill // layout.pcp + decode // _decode_share(layout)
    state = linear_state_flops(spec) // layout.tp * rank_tokens(layout, step)
    return 2 * (spec.num_heads // layout.tp) * (spec.head_dim + value_dim) * pairs + state


def _decode_share(layout: Layout) -> int:
    """By how much dcp lowers a rank's decode scores: ranks that share positions within tp take each other's
    heads.
    """
    return layout.pcp if layout.pcp > 1 and layout.dcp > 1 else 1


def _head_flops(layout: Layout, spec: ModelSpec, step: StepShape) -> int:
    return 2 * spec.hidden_size * -(-spec.vocab_size // layout.tp) * step.num_logits


def step_work(layout: Layout, spec: ModelSpec, step: StepShape, dtype_bytes: int) -> StepWork:
    """What one rank holds, and what a step reads and computes in series. `dtype_bytes` for weights and KV
    alike.
    """
    ranks = path_ranks(layout)
    flops = (_linear_flops, _expert_flops, _score_flops, _head_flops)
    return StepWork(
        rank_weight_bytes=max(sum(rank_memory(layout, spec, rank, dtype_bytes).values()) for rank in ranks),
        rank_kv_bytes=max(
            step.kv_tokens * kv_bytes_per_token(layout, spec, rank, dtype_bytes) for rank in ranks
        ),
        step_read_bytes=_read_bytes(layout, spec, step, dtype_bytes),
        step_flops=sum(part(layout, spec, step) for part in flops),
        num_replicas=layout.dp,
        steps_in_flight=layout.pp,
        expert_columns=spec.moe.intermediate_size // (layout.tp if layout.ep == 1 else 1) if spec.moe else 0,
    )
