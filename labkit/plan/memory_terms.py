"""What an engine holds besides weights and KV, each term from what vLLM does in its profile run.

vLLM (v1/worker/gpu_worker.py, 0.19) gives the KV cache what is left of gpu_memory_utilization × total after the
weights, the peak of a profile run, the memory outside PyTorch, and, from 0.21 on by default, its estimate of the CUDA
graphs. The profile run passes max_num_batched_tokens tokens through the layers, then samples for max_num_seqs sequences
with top-k and top-p; the larger of both moments is the peak. Figures in GiB called measured, and those that the tests
hold the formulas against, are from the accuracy report of a capacity planner (vLLM 0.19.0 on an H100, 49 runs).
"""

from __future__ import annotations

from dataclasses import replace

from labkit.layout import Layout, is_last_stage, layers
from labkit.model.shapes import ModelSpec
from labkit.plan.chips import Chip
from labkit.plan.work import EngineSettings

GIB, MIB = 2**30, 2**20
FLOAT32 = 4
HALF = 2  # bytes of what flows between layers: bfloat16 whatever the weights are kept in

DRIVER_BYTES = int(0.07 * GIB)
"""Outside PyTorch on a rank that does not sample (measured, PP 2 and 4): kernels' code and cuBLAS handles."""
SWITCHED_COMMUNICATOR_BYTES = int(1.85 * GIB)
"""A tensor-parallel group on NVSwitch, after NCCL's own start: measured 1.82 GiB at TP 2, 1.88 at TP 4 (workspaces of
the fused and the symmetric-memory all-reduce)."""
COMMUNICATOR_BYTES = int(0.42 * GIB)
"""A group that has NCCL alone: measured 0.55 − 0.13 GiB at TP 2 with vLLM 0.11, before the fused kernels."""
GRAPH_PIECE_BYTES = 128 * 1024
"""Of the driver for one captured piece (a layer between two attentions). Fitted on vLLM's own estimates of three models
(Qwen3-0.6B, Qwen2.5-7B, Llama-3.1-8B: 100, 190 and 150 KiB a piece); residual 30 %."""
LARGEST_CAPTURE = 512
SPLITS_IN_GRAPHS = 32
"""flash_attn_max_num_splits_for_cuda_graph of vLLM."""


def kept_tokens(settings: EngineSettings, layout: Layout) -> int:
    """New tokens that one rank sees in a full step."""
    return -(-settings.max_num_batched_tokens // layout.pcp)


# ---- the peak of the profile run


def _widest(layout: Layout, spec: ModelSpec) -> int:
    """Numbers a token of the widest moment inside a layer: gate, up and their product of a dense MLP."""
    if spec.moe and not spec.moe.dense_layers:
        return 3 * spec.moe.shared_intermediate_size // layout.tp
    return 3 * spec.intermediate_size // layout.tp


def forward_peak(layout: Layout, spec: ModelSpec, settings: EngineSettings) -> int:
    """Bytes while the layers run: the widest moment beside the attention's output, the residual before and after."""
    return kept_tokens(settings, layout) * (_widest(layout, spec) + 3 * spec.hidden_size) * HALF


def sampling_peak(layout: Layout, spec: ModelSpec, settings: EngineSettings, chip: Chip) -> int:
    """Bytes while the sampler runs: logits as computed and in float32, probabilities, exponential noise; a row of
    float32 logits for each program of the top-k/top-p kernel, one a multiprocessor; and the hidden states of the step,
    of the sampled rows, and a random stand-in for them. Logits are whole on every rank.
    """
    rows = min(settings.max_num_seqs, settings.max_num_batched_tokens)
    programs = min(rows, chip.num_multiprocessors)
    programs = min(1 << (programs - 1).bit_length(), chip.num_multiprocessors)
    logits = (rows * (HALF + 3 * FLOAT32) + programs * FLOAT32) * spec.vocab_size
    return logits + (kept_tokens(settings, layout) + 2 * rows) * spec.hidden_size * HALF


def torch_peak(layout: Layout, spec: ModelSpec, rank: int, settings: EngineSettings, chip: Chip) -> int:
    """Bytes above weights and workspace at the peak of the profile run. A rank that does not sample hands on hidden
    state and residual instead.
    """
    forward = forward_peak(layout, spec, settings)
    if is_last_stage(layout, rank):
        return max(forward, sampling_peak(layout, spec, settings, chip))
    return forward + 2 * kept_tokens(settings, layout) * spec.hidden_size * HALF


# ---- what stands


def expert_workspace(layout: Layout, spec: ModelSpec, settings: EngineSettings) -> int:
    """Two buffers of the fused experts (vLLM's TritonExperts): a row for each token and chosen expert, once as wide as
    gate and up together or the hidden state, once as wide as their product or the hidden state. MXFP4 has kernels of
    its own, which measured nothing here.
    """
    if spec.moe is None or (spec.quantization and spec.quantization.method == "mxfp4"):
        return 0
    width = spec.moe.intermediate_size // (1 if layout.ep > 1 else layout.tp)
    rows = kept_tokens(settings, layout) * spec.moe.top_k
    if layout.ep > 1:  # the tokens of the group, each for the experts that are here
        rows = rows * (layout.dp if layout.attention_dp else 1) // layout.ep * layout.tp
    return rows * (max(2 * width, spec.hidden_size) + max(width, spec.hidden_size)) * HALF


def rope_cache(spec: ModelSpec) -> int:
    """Cosines and sines of every position, once a model."""
    dim = spec.mla.qk_rope_head_dim if spec.mla else spec.head_dim
    return spec.max_positions * int(dim * spec.rope.share) * HALF


def padding(spec: ModelSpec, layout: Layout, expert_bytes: int) -> int:
    """Bytes that MXFP4 kernels add to the experts: hidden size to a multiple of 256, columns of a rank to one of 128
    (vLLM, Marlin backend).
    """
    if spec.moe is None or not (spec.quantization and spec.quantization.padded):
        return 0
    columns = -(-spec.moe.intermediate_size // (1 if layout.ep > 1 else layout.tp))
    columns = -(-columns // 32) * 32
    grown = _up(spec.hidden_size, 256) * _up(columns, 128) / (spec.hidden_size * columns)
    return round(expert_bytes * (grown - 1))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def graphs(layout: Layout, spec: ModelSpec, rank: int, settings: EngineSettings, chip: Chip) -> int:
    """CUDA graphs: activations of the largest captured size, cuBLAS' workspace of the capturing stream, FlashAttention
    3's partial results, and the driver's share of every captured piece. Sizes go up to twice max_num_seqs, at most 512.
    """
    if not settings.cuda_graphs:
        return 0
    largest = min(2 * settings.max_num_seqs, settings.max_num_batched_tokens, LARGEST_CAPTURE)
    full = min(settings.max_num_seqs, largest)
    pieces = (num_captures(largest) + num_captures(full)) * len(layers(layout, spec, rank))
    held = forward_peak(layout, spec, replace(settings, max_num_batched_tokens=largest, max_num_seqs=full))
    if chip.split_attention and spec.mla is None:
        held += full * SPLITS_IN_GRAPHS * spec.num_heads // layout.tp * spec.head_dim * FLOAT32
    return held + chip.cublas_workspace + pieces * GRAPH_PIECE_BYTES


def num_captures(largest: int) -> int:
    """vLLM's sizes: 1, 2, 4, every 8 below 256, every 16 from there on."""
    return sum(size <= largest for size in [1, 2, 4, *range(8, 256, 8), *range(256, LARGEST_CAPTURE + 1, 16)])


def communicators(layout: Layout, spec: ModelSpec, chip: Chip) -> int:
    """Buffers of the groups that a rank is in; what NCCL takes when it starts lies outside of vLLM's count."""
    inside = (SWITCHED_COMMUNICATOR_BYTES if chip.nvswitch else COMMUNICATOR_BYTES) if layout.ranks_per_stage > 1 else 0
    return inside + (COMMUNICATOR_BYTES if layout.dp > 1 and spec.moe else 0)


def outside_torch(layout: Layout, rank: int, chip: Chip) -> int:
    """The driver's: code and handles, and on a rank that samples the stack of a kernel that spills, a thread each."""
    return DRIVER_BYTES + (chip.local_memory if is_last_stage(layout, rank) else 0)


def own_activations(layout: Layout, spec: ModelSpec, settings: EngineSettings) -> int:
    """Of labkit's own engine, as `labkit.measure.memory` counts it: residual and normed rows beside the widest part of
    a layer, or the logits of every sequence.
    """
    attention = (2 * spec.num_heads + 2 * max(spec.num_kv_heads, layout.tp)) * spec.head_dim // layout.tp
    wide = [attention, 3 * spec.intermediate_size // layout.tp]
    if spec.moe:
        wide.append(3 * spec.moe.top_k * spec.moe.intermediate_size // layout.tp)
    rows = kept_tokens(settings, layout) * (2 * spec.hidden_size + max(wide)) * spec.dtype_bytes
    sampled = min(settings.max_num_batched_tokens, settings.max_num_seqs)
    return max(rows, sampled * spec.vocab_size * FLOAT32)
