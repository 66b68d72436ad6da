"""What one rank of a pipeline stage computes, reads and sends for each token: the coefficients of a step's time.

Taken once per (layout, model, hardware) from the slices that the rank holds and the traffic of each axis; a step is
then a handful of multiplications. Bytes and operations are of the rank with the longest path of its stage (rank 0).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from labkit.layout import Coords, Crossing, Layout, StepShape, kv_bytes_per_token, rank_memory
from labkit.layout.ownership import is_last_stage, layers, stage_layers
from labkit.layout.slices import counted_tensors, slice_tensor
from labkit.layout.traffic import axis_traffic, num_moe_layers
from labkit.model.shapes import ModelSpec
from labkit.model.tensors import ATTENTION, EMBEDDING, EXPERTS, HEAD, MLP, NORM, ROUTER, SHARED_EXPERTS, expert_tensors
from labkit.plan.collective_cost import link_bandwidth, wire_bytes
from labkit.plan.engine_cost import MAX_OF_NORMALS
from labkit.plan.hardware import Device, Hardware, Link

DENSE = (ATTENTION, MLP, SHARED_EXPERTS, ROUTER, NORM)
_MANY = 1 << 20
"""Tokens of the probe that traffic is asked for: rounding to whole rows disappears."""
_CHOSEN_BYTES = 8
"""An expert's number and weight, 32 bits each."""


@dataclass(frozen=True, slots=True)
class AxisCost:
    """Seconds that one axis's operations take in a step: constants and slopes, latencies of an engine's own small
    all-reduce apart (they are the engine's)."""

    axis: str
    prefill_latency_s: float = 0.0
    """Of the operations that a step with prompt tokens does and one without them does not, and so on."""
    decode_latency_s: float = 0.0
    both_latency_s: float = 0.0
    small_ops: float = 0.0
    """All-reduces and gathers on the fast link, whose latency the engine's kernels decide."""
    small_limit_s: float = 0.0
    """The library's latency on that link: the engine's is never above it."""
    prefill_token_s: float = 0.0
    decode_token_s: float = 0.0
    logit_s: float = 0.0
    gathered_from: int = 0
    """Other ranks whose tokens are all gathered here; 0: nothing is gathered by token on this axis."""


@dataclass(frozen=True)
class StageShape:
    """Of one rank; `*_flops` and `*_bytes` are a token's unless named otherwise."""

    layers: int
    moe_layers: int
    dense_bytes: float
    """Weights that every step reads."""
    dense_flops: float
    dense_rate: float
    expert_bytes: float
    """All routed experts of the rank."""
    expert_flops: float
    expert_rate: float
    expert_miss: float
    """1 − top_k ÷ experts: the chance that a token leaves an expert alone."""
    expert_replicas: int
    """Replicas whose tokens reach the rank's experts (attention-DP)."""
    expert_spread: float
    """Ranks that share experts out: over how many the busiest must be looked for."""
    expert_spread_normal: float
    """How far the busiest of them is above the mean, in standard deviations."""
    experts_here: float
    """Routed experts of a layer on the rank."""
    expert_columns: float
    """Width of one expert's matrices on the rank: ep keeps them whole, tp makes them thin."""
    head_bytes: float
    head_flops: float
    head_rate: float
    pair_flops: float
    """A (query, key) pair of all layers that see everything."""
    window_pair_flops: float
    context_bytes: float
    """Keys and values of a cached token in those layers."""
    window_context_bytes: float
    state_bytes: float
    """Read and written for each decoding sequence in layers of linear attention."""
    linear_layers: float
    """Layers of linear attention, which keep a state."""
    latent_layers: float
    """Layers of latent attention (MLA), which take more kernels."""
    attention_rate: float
    hidden_bytes: float
    """Hidden states of a token, once a layer."""
    prefill_share: float
    """1 ÷ pcp: of a prompt's tokens and pairs that fall on the rank."""
    axes: tuple[AxisCost, ...]


def compute_rate(device: Device, bits: float, spec: ModelSpec) -> float:
    """Dense FLOP/s of matrices kept in `bits`, by the datasheet and what the device holds of it beside Hopper.
    Integers of few bits are weights only and multiply as bfloat16; so do 4-bit floats on a device without them."""
    method = spec.quantization.method if spec.quantization else ""
    width = 16
    if 6 < bits <= 12 and ("fp8" in method or "float" in method or not method):
        width = 8
    elif bits <= 6 and "fp4" in method and "float4" in device.rates:
        width = 4
    return device.rate(width).value * device.sustained


def _elements(layout: Layout, spec: ModelSpec, rank: int) -> dict[str, float]:
    """Part → matrix elements of the rank."""
    found: dict[str, float] = {}
    for tensor, times in counted_tensors(layout, spec, rank):
        if len(tensor.shape) > 1:
            piece = slice_tensor(layout, spec, rank, tensor)
            found[tensor.part] = found.get(tensor.part, 0.0) + times * piece.num_elements
    return found


def _bits(memory: dict[str, int], elements: dict[str, float], parts: tuple[str, ...]) -> float:
    count = sum(elements.get(part, 0.0) for part in parts)
    return 8 * sum(memory.get(part, 0) for part in parts if elements.get(part)) / count if count else 16.0


@lru_cache(maxsize=4096)
def stage_shapes(
    layout: Layout, spec: ModelSpec, hardware: Hardware, kv_bytes: int, engine_traffic: bool
) -> tuple[StageShape, ...]:
    """One shape a stage. `kv_bytes`: of a cached number. `engine_traffic`: the experts' traffic of vLLM, SGLang and
    TensorRT-LLM as they are set by default, instead of labkit's exchange: inside tensor parallelism they end in an
    all-reduce; under attention-DP in one node every rank gathers everybody's tokens and the sums are scattered back
    (across nodes they are told to use an exchange of their own)."""
    return tuple(_stage(layout, spec, hardware, stage, kv_bytes, engine_traffic) for stage in range(layout.pp))


def _stage(
    layout: Layout, spec: ModelSpec, hardware: Hardware, stage: int, kv_bytes: int, engine_traffic: bool
) -> StageShape:
    rank, device = layout.rank_of(Coords(0, stage, 0, 0)), hardware.device
    mine = stage_layers(layout, spec, stage)
    moe_layers = sum(spec.is_moe_layer(layer) for layer in mine)
    memory, elements = rank_memory(layout, spec, rank, spec.dtype_bytes), _elements(layout, spec, rank)
    heads = spec.num_heads // layout.tp
    per_pair = 2.0 * heads * (spec.head_dim + (spec.mla.v_head_dim if spec.mla else spec.head_dim))
    attending = [layer for layer in mine if not spec.is_linear_layer(layer)]
    full = sum(spec.window(layer) is None for layer in attending)
    cached = kv_bytes_per_token(layout, spec, rank, kv_bytes) / max(1, len(attending))
    linear = spec.linear_attention
    state = 2.0 * linear.state_numbers * linear.state_bytes / layout.tp if linear else 0.0
    miss, one, spread = 0.0, 0.0, 1
    if spec.moe and moe_layers:
        miss, spread = 1 - spec.moe.top_k / spec.moe.num_experts, layout.ep
        one = moe_layers * spec.moe.top_k * sum(tensor.num_elements for tensor in expert_tensors(spec, 0)) / layout.tp
    head = memory.get(HEAD, 0) or (memory.get(EMBEDDING, 0) if spec.tie_word_embeddings else 0)
    head = head if is_last_stage(layout, rank) else 0
    head_elements = head / spec.dtype_bytes
    return StageShape(
        layers=len(layers(layout, spec, rank)), moe_layers=moe_layers,
        dense_bytes=float(sum(memory.get(part, 0) for part in DENSE)),
        dense_flops=2.0 * sum(elements.get(part, 0.0) for part in DENSE),
        dense_rate=compute_rate(device, _bits(memory, elements, DENSE[:3]), spec),
        expert_bytes=float(memory.get(EXPERTS, 0)), expert_flops=2.0 * one,
        expert_rate=compute_rate(device, _bits(memory, elements, (EXPERTS,)), spec), expert_miss=miss,
        expert_replicas=layout.dp if layout.attention_dp else 1, expert_spread=spread,
        expert_spread_normal=MAX_OF_NORMALS.get(spread, 2.2),
        experts_here=spec.moe.num_experts / layout.ep if one and spec.moe else 1.0,
        expert_columns=spec.moe.intermediate_size / (layout.tp if layout.ep == 1 else 1) if one and spec.moe else 1e6,
        head_bytes=float(head), head_flops=2.0 * head_elements, head_rate=compute_rate(device, 16, spec),
        pair_flops=per_pair * full, window_pair_flops=per_pair * (len(attending) - full),
        context_bytes=cached * full, window_context_bytes=cached * (len(attending) - full),
        state_bytes=state * (len(mine) - len(attending)), latent_layers=float(len(mine) if spec.mla else 0),
        linear_layers=float(len(mine) - len(attending)),
        attention_rate=device.rate(16).value * device.sustained,
        hidden_bytes=float(len(mine) * spec.hidden_size * spec.dtype_bytes),
        prefill_share=1 / layout.pcp, axes=tuple(_axes(layout, spec, hardware, stage, engine_traffic)),
    )  # fmt: skip


# ---- what crosses


def _axes(layout: Layout, spec: ModelSpec, hardware: Hardware, stage: int, engine_traffic: bool) -> Iterator[AxisCost]:
    rank = layout.rank_of(Coords(0, stage, 0, 0))
    for axis in ("tp", "pcp", "dcp", "ep", "pp"):
        group = layout.group_of(axis, rank)
        if len(group) == 1 or (axis == "pp" and stage == layout.pp - 1):
            continue
        share = 1 / layout.pp if axis != "pp" else 1 / (layout.pp - 1)  # of the whole path's operations: this stage's
        link = hardware.link(group if axis != "pp" else (rank, layout.group_of(axis, rank)[stage + 1]))
        if engine_traffic and axis == "ep" and layout.attention_dp and link.kind != "network":
            crossings = _gathered(layout, spec, prefill=True), _gathered(layout, spec, prefill=False)
        else:
            crossings = _crossings(axis, layout, spec, engine_traffic)
        yield _axis_cost(axis, crossings, link, len(group), share, _ranks_per_node(hardware, group))


def _ranks_per_node(hardware: Hardware, group: tuple[int, ...]) -> int:
    node = group[0] // hardware.gpus_per_node
    return sum(rank // hardware.gpus_per_node == node for rank in group)


def _crossings(
    axis: str, layout: Layout, spec: ModelSpec, engine_traffic: bool
) -> tuple[tuple[Crossing, ...], tuple[Crossing, ...]]:
    """The operations of a step that only prefills `_MANY` tokens, and of one that only decodes as many."""
    inside = engine_traffic and layout.ep > 1 and not layout.attention_dp
    if inside and axis == "ep":
        return (), ()
    seen = Layout(dp=layout.dp, pp=layout.pp, pcp=layout.pcp, tp=layout.tp, dcp=layout.dcp) if inside else layout
    shapes = StepShape(prefill_tokens=_MANY), StepShape(decode_seqs=_MANY)
    prefill, decode = (axis_traffic(axis, seen, spec, shape, spec.dtype_bytes) for shape in shapes)
    return prefill, decode


def _gathered(layout: Layout, spec: ModelSpec, *, prefill: bool) -> tuple[Crossing, ...]:
    """Experts under attention-DP: `allgather_reducescatter`, vLLM's default (docs.vllm.ai, serving/
    expert_parallel_deployment, which names exchanges for several nodes), and what SGLang and TensorRT-LLM do where no
    all-to-all library is named. A token goes to each rank once, where an exchange sends it once for each of its
    experts; their numbers and weights ride along."""
    tokens = -(-_MANY // (layout.tp * (layout.pcp if prefill else 1)))
    row, count = spec.hidden_size * spec.dtype_bytes, num_moe_layers(spec)
    chosen = spec.moe.top_k * _CHOSEN_BYTES if spec.moe else 0
    return (
        Crossing("all_gather", count, tokens * (row + chosen), "everybody's tokens to each owner of experts"),
        Crossing("reduce_scatter", count, tokens * row * layout.ep, "sums of expert outputs back"),
    )


def _axis_cost(
    axis: str, crossings: tuple[tuple[Crossing, ...], tuple[Crossing, ...]], link: Link, degree: int, share: float,
    ranks_per_node: int,
) -> AxisCost:  # fmt: skip
    prefill, decode = crossings
    latency = {"prefill": 0.0, "decode": 0.0, "both": 0.0}
    slope = {"prefill": 0.0, "decode": 0.0, "logit": 0.0}
    small_ops = 0.0
    own_kernels = link.kind in ("nvlink", "nvlink-pairs", "xgmi") and axis == "tp"
    shared = {each.what for each in prefill} & {each.what for each in decode}
    for phase, found in (("prefill", prefill), ("decode", decode)):
        for each in found:
            once = each.what not in shared or phase == "decode"  # a latency that both phases share is paid once
            when = "both" if each.what in shared else phase
            if once and own_kernels:
                small_ops += share * each.count
            elif once:
                one = link.message_latency_s.value if each.operation == "isend" else link.latency_s.value
                latency[when] += share * each.count * one
            rows = 1 if each.operation == "gather" and phase == "prefill" else _MANY
            bandwidth = link.message_bandwidth.value
            if each.operation != "isend":
                bandwidth = link_bandwidth(link, each.operation, degree, ranks_per_node)
            seconds = share * each.count * wire_bytes(each.operation, each.bytes_each, degree) / bandwidth / rows
            if each.operation == "gather":
                slope["logit"] = seconds if phase == "decode" else slope["logit"]
            else:
                slope[phase] += seconds
    return AxisCost(
        axis, latency["prefill"], latency["decode"], latency["both"], small_ops, link.latency_s.value,
        slope["prefill"], slope["decode"], slope["logit"],
        gathered_from=degree - 1 if axis == "ep" and any(each.operation == "all_gather" for each in prefill) else 0,
    )  # fmt: skip
