"""One stage's time with everything multiplied out beforehand: what a simulator asks a million times.

The same figures as `labkit.plan.engine_cost.work_seconds` and its neighbours, which stay the readable form; a test
holds them together.
"""

from __future__ import annotations

from collections.abc import Callable

from labkit.plan.engine_cost import (
    LAUNCH_CORNER,
    EngineConstants,
    gathered_share,
    graph_padding,
    launch_seconds,
    shared_ratio,
)
from labkit.plan.stage_shape import AxisCost, StageShape
from labkit.plan.work import StepWork


def stage_time(
    shape: StageShape, c: EngineConstants, bandwidth: float, skew: float, graph_tokens: int
) -> Callable[[StepWork], float]:
    """Seconds of a step on one stage. `skew`: the busiest expert rank's load over the mean's. `graph_tokens`: as in
    `labkit.plan.engine_cost.not_shorter`."""
    p, q = c.corner, 1 / c.corner
    dense_memory = (shape.dense_bytes / (bandwidth * c.weight_efficiency)) ** p
    dense_token = shape.dense_flops / (shape.dense_rate * c.matrix_efficiency)
    head_memory = (shape.head_bytes / (bandwidth * c.weight_efficiency)) ** p
    head_row = shape.head_flops / (shape.head_rate * c.matrix_efficiency)
    experts = _experts_time(shape, c, bandwidth, skew) if shape.expert_bytes else None
    share, kv = shape.prefill_share, 1 / (bandwidth * c.kv_efficiency)
    pair, window_pair = (
        each * share / (shape.attention_rate * c.attention_efficiency)
        for each in (shape.pair_flops, shape.window_pair_flops)
    )
    full, window = shape.context_bytes * kv, shape.window_context_bytes * kv
    token = c.hidden_passes * shape.hidden_bytes / bandwidth
    always = _always(shape, c)
    prefill_once = sum(axis.prefill_latency_s for axis in shape.axes)
    decode_once = sum(axis.decode_latency_s for axis in shape.axes)
    prefill_token = sum(axis.prefill_token_s for axis in shape.axes)
    gathered = [axis for axis in shape.axes if axis.gathered_from]
    padded = sum(axis.decode_token_s for axis in shape.axes)
    decode = padded + c.sequence_s + shape.state_bytes * kv
    row = sum(axis.logit_s for axis in shape.axes)
    launches = launch_seconds(shape, c)

    def seconds(work: StepWork) -> float:
        prompt, decodes, logits = work.prefill_tokens, work.decodes, work.logits
        padding = graph_padding(prompt + decodes, graph_tokens)
        own = prompt * share + decodes
        tokens = own + padding
        total = always + (dense_memory + (dense_token * tokens) ** p) ** q + token * tokens
        total += (head_memory + (head_row * logits) ** p) ** q + decode * decodes + row * logits
        total += padded * padding
        total += full * (work.decode_context + work.prefill_context)
        if window:
            total += window * (work.decode_window_context + work.prefill_context)
        if experts is not None:
            total += experts(own * shared_ratio(work) if work.shared_rows else tokens)
        if work.shared_rows:
            total -= sum(_spared(axis, work, padding) for axis in gathered)
        if decodes:
            total += decode_once * decodes / (decodes + 1)
        if not prompt:
            return total
        total += pair * work.prefill_pairs + window_pair * work.prefill_window_pairs + prefill_token * prompt
        total += c.sequence_s * work.prefill_seqs + prefill_once * prompt / (prompt + 1)
        if prompt + decodes <= graph_tokens:
            return total
        launched = launches * prompt / (prompt + 1)
        return (total**LAUNCH_CORNER + launched**LAUNCH_CORNER) ** (1 / LAUNCH_CORNER)

    return seconds


def _experts_time(shape: StageShape, c: EngineConstants, bandwidth: float, skew: float) -> Callable[[float], float]:
    """Seconds of a stage's routed experts by the rows of a replica."""
    p, q = c.corner, 1 / c.corner
    thin = shape.expert_columns / (shape.expert_columns + c.thin_columns)
    memory = shape.expert_bytes / (bandwidth * c.expert_efficiency * thin)
    token = shape.expert_flops / (shape.expert_rate * c.expert_matrix_efficiency * thin)
    miss, replicas, here = shape.expert_miss, shape.expert_replicas, shape.experts_here
    spread, hit = shape.expert_spread_normal, (1 - shape.expert_miss) * shape.experts_here

    def seconds(rows: float) -> float:
        touched = 1 - miss ** (rows * replicas)
        busiest, uneven = touched, 1.0
        if spread:
            busiest = min(1.0, touched + spread * ((touched * (1 - touched) + 1e-12) / here) ** 0.5)
            uneven = min(3.0, 1 + spread / (rows * replicas * hit + 1e-6) ** 0.5)
        return skew * ((memory * busiest) ** p + (token * rows * uneven) ** p) ** q

    return seconds


def _always(shape: StageShape, c: EngineConstants) -> float:
    """Seconds of a step whatever is in it: small all-reduces, latencies, and what each layer takes to be begun."""
    small = sum(axis.small_ops * min(axis.small_limit_s, c.reduce_s) + axis.both_latency_s for axis in shape.axes)
    dense = c.layer_s * shape.layers + c.expert_layer_s * shape.moe_layers
    return small + dense + c.latent_layer_s * shape.latent_layers + c.linear_layer_s * shape.linear_layers


def _spared(axis: AxisCost, work: StepWork, padding: float) -> float:
    """Seconds that an axis takes less because the other replicas have fewer rows than this one with its padding."""
    moved = axis.prefill_token_s * work.prefill_tokens + axis.decode_token_s * work.decodes
    return (1 - gathered_share(axis.gathered_from, work)) * moved + axis.decode_token_s * padding
