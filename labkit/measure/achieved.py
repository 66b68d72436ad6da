"""What the ranks got out of the machine while they computed: bytes/s and FLOP/s of steps, against measured roofs.

The numerators are counted from the model (weights and KV that a step reads, products and attention that it computes),
the denominator is the ranks' own compute time, collectives left out. So a figure is an average that includes whatever
else the rank did between its collectives: launching, sampling, Python. Experts are counted under uniform routing,
norms and softmax not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from labkit.layout import Layout, is_last_stage, kv_bytes_per_token, layers, pools_of, rank_memory, read_layout
from labkit.layout.slices import counted_tensors, slice_tensor
from labkit.layout.work import touched_experts
from labkit.measure.breakdown import phase_of
from labkit.measure.records import StepRecord
from labkit.model.spec import DTYPE_BYTES, ModelSpec, load_spec
from labkit.model.tensors import EMBEDDING, EXPERTS, HEAD


class Roofs(Protocol):
    """What the machine could do at best, GB = 1e9: all cores of a CPU together, or one GPU."""

    @property
    def read_gb_s(self) -> float: ...
    @property
    def gflop_s(self) -> float: ...


@dataclass(frozen=True)
class Achieved:
    """Of the steps of some kinds. The shares are of the roofs, None where these are not known."""

    num_steps: int
    gb_s: float
    """Of the whole machine on a CPU (one rank's, times the ranks that share the cores), of one rank on a GPU."""
    gflop_s: float
    read_mib: float
    """Weights and KV that one rank reads in a step, on average."""
    read_share: float | None = None
    flop_share: float | None = None

    def sentence(self) -> str:
        text = f"{self.read_mib:.1f} MiB read per rank and step, {self.gb_s:.2g} GB/s and {self.gflop_s:.3g} GFLOP/s"
        if self.read_share is None or self.flop_share is None:
            return f"{text}; the machine's roofs are not known"
        products = f"{self.flop_share:.0%} of what products reach on its cores"
        text += f": {self.read_share:.0%} of what memory gives and {products}"
        return text + (" (above memory's roof: the caches hold the weights)" if self.read_share > 1 else "")


def achieved(
    steps: Iterable[StepRecord], summary: dict[str, Any], roofs: Roofs | None = None
) -> Achieved | None:
    """None without a step, or where the model is not known here (then there is nothing to count)."""
    environment = summary.get("environment") or {}
    found = [step for step in steps if any(step.compute_ns)]
    try:
        spec = load_spec(summary["model"])
        pools = pools_of(read_layout(summary["layout"] or ""))
    except (FileNotFoundError, ValueError):
        return None
    where = {rank: (pool.layout, rank - pool.first_rank) for pool in pools for rank in pool.ranks}
    if not found or not all(rank in where for step in found for rank in step.ranks):
        return None
    dtype = DTYPE_BYTES[environment.get("dtype") or spec.dtype]
    rows = [
        (_read_bytes(*where[rank], spec, dtype, step), _flops(*where[rank], spec, step), step.compute_ns[i])
        for step in found
        for i, rank in enumerate(step.ranks)
    ]
    num_bytes, flops, compute_ns = (sum(column) for column in zip(*rows, strict=True))
    together = len({rank for step in found for rank in step.ranks}) if environment.get("backend") != "cuda" else 1
    gb_s, gflop_s = num_bytes / compute_ns * together, flops / compute_ns * together
    shares = (gb_s / roofs.read_gb_s, gflop_s / (roofs.gflop_s * _cores_used(environment))) if roofs else (None, None)
    return Achieved(len(found), gb_s, gflop_s, num_bytes / len(rows) / 2**20, *shares)


def _cores_used(environment: dict[str, Any]) -> float:
    """The share of a CPU's cores that the layout's ranks run on: the roof of products is all cores'; memory's is one
    that a few cores reach too.
    """
    used = environment.get("num_ranks", 1) * environment.get("threads_per_rank", 1)
    return min(1.0, used / environment["num_cores"]) if environment.get("backend") == "cpu" else 1.0


@lru_cache(maxsize=256)
def _weights(layout: Layout, spec: ModelSpec, rank: int, dtype: int) -> tuple[int, int]:
    """(bytes that every step reads, bytes of experts). A tied embedding is read whole, as the head."""
    memory = rank_memory(layout, spec, rank, dtype)
    experts = memory.pop(EXPERTS, 0)
    if not (spec.tie_word_embeddings and layout.pp == 1):
        memory.pop(EMBEDDING, None)
    return sum(memory.values()), experts


def _num_tokens(step: StepRecord) -> int:
    return step.prefill_tokens + step.num_decode_seqs


def _read_bytes(layout: Layout, rank: int, spec: ModelSpec, dtype: int, step: StepRecord) -> float:
    dense, experts = _weights(layout, spec, rank, dtype)
    touched = 1.0
    if experts and spec.moe:
        touched = touched_experts(spec.moe.num_experts, spec.moe.top_k, _num_tokens(step)) / spec.moe.num_experts
    return dense + experts * touched + step.context_tokens * kv_bytes_per_token(layout, spec, rank, dtype)


@lru_cache(maxsize=256)
def _products(layout: Layout, spec: ModelSpec, rank: int) -> tuple[float, int, int]:
    """Numbers in the matrices that a token passes on this rank, its layers, numbers in the head: that runs for sampled
    positions only.
    """
    routed = spec.moe.top_k / spec.moe.num_experts if spec.moe else 1.0
    held = sum(
        times * slice_tensor(layout, spec, rank, tensor).num_elements * (routed if tensor.part == EXPERTS else 1.0)
        for tensor, times in counted_tensors(layout, spec, rank)
        if tensor.linear and tensor.part != HEAD
    )
    head = spec.hidden_size * -(-spec.vocab_size // layout.tp) if is_last_stage(layout, rank) else 0
    return held, len(layers(layout, spec, rank)), head


def _flops(layout: Layout, rank: int, spec: ModelSpec, step: StepRecord) -> float:
    held, num_layers, head = _products(layout, spec, rank)
    value_dim = spec.mla.v_head_dim if spec.mla else spec.head_dim
    per_pair = 2 * spec.num_heads / layout.tp * (spec.head_dim + value_dim) * num_layers
    body = 2 * _num_tokens(step) * held + per_pair * _pairs(step)
    return body / layout.pcp + 2 * head * (step.num_decode_seqs + step.num_prefill_seqs)


def _pairs(step: StepRecord) -> float:
    """(query, key) pairs: a decode sees its context, a chunk half of itself too. In a mixed step the context is taken
    to be shared evenly by its sequences.
    """
    seqs = step.num_prefill_seqs + step.num_decode_seqs
    if not seqs:
        return 0.0
    own = step.prefill_tokens / step.num_prefill_seqs / 2 if step.num_prefill_seqs else 0.0
    return _num_tokens(step) * step.context_tokens / seqs + step.prefill_tokens * own


def of_phases(steps: Sequence[StepRecord], phases: Sequence[str]) -> list[StepRecord]:
    return [step for step in steps if phase_of(step) in phases]
