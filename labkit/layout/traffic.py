"""What crosses between ranks in one step: the operations of each axis, how many, and how many bytes each.

Counts follow one step of one replica through all its stages. `bytes_each` is what one rank hands to the
operation, the same figure that the door records: the tensor that is summed, its own share of what is
gathered, the message that is sent. Expert traffic assumes uniform routing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from labkit.layout.grid import Layout
from labkit.layout.ownership import padded_vocab
from labkit.model.shapes import ModelSpec

MERGE_BYTES = 4
"""Partial attention is merged in float32, whatever the weights are kept in."""
EXPERT_LABEL = 1
"""Numbers that a token carries to an expert's owner beside its hidden state: which expert it is for."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What one step of one replica computes."""

    prefill_tokens: int = 0
    """New prompt tokens (one prompt, from its start)."""
    decode_seqs: int = 0
    """Sequences that decode one token each."""
    context_tokens: int = 0
    """Tokens already in the cache of each decoding sequence."""

    def __post_init__(self) -> None:
        for name in ("prefill_tokens", "decode_seqs", "context_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} is {value!r}; it must be a whole number from 0 on.")

    @property
    def num_tokens(self) -> int:
        return self.prefill_tokens + self.decode_seqs

    @property
    def num_logits(self) -> int:
        """Positions that are sampled: each decode, and the end of the prompt."""
        return self.decode_seqs + (self.prefill_tokens > 0)

    @property
    def kv_tokens(self) -> int:
        """Tokens in the cache once the step is over."""
        return self.prefill_tokens + self.decode_seqs * (self.context_tokens + 1)


@dataclass(frozen=True, slots=True)
class Crossing:
    """`count` operations of `bytes_each` in one step; see the module's docstring for what the bytes are."""

    operation: str
    count: int
    bytes_each: int
    what: str

    def wire_bytes(self, degree: int) -> int:
        """Bytes that one rank sends for all of them with ring algorithms among `degree` ranks: 2(n−1)/n of
        what it hands to an all-reduce, (n−1)/n for a reduce-scatter or all-to-all, n−1 times its share for an
        all-gather, once for a gather or a message (Thakur et al. 2005).
        """
        total = self.count * self.bytes_each
        if self.operation in ("isend", "gather"):
            return total
        if self.operation == "all_gather":
            return total * (degree - 1)
        return (2 if self.operation == "all_reduce" else 1) * total * (degree - 1) // degree


def rank_tokens(layout: Layout, step: StepShape) -> int:
    """New tokens that pass through a rank: pcp shares out a prompt, decodes run on every pcp rank."""
    return -(-step.prefill_tokens // layout.pcp) + step.decode_seqs


def num_moe_layers(spec: ModelSpec) -> int:
    return sum(spec.is_moe_layer(layer) for layer in range(spec.num_layers))


def _tp(layout: Layout, spec: ModelSpec, step: StepShape, dtype_bytes: int) -> Iterator[Crossing]:
    tokens, row = rank_tokens(layout, step), spec.hidden_size * dtype_bytes
    size = tokens * row
    # a combine of experts leaves each rank with its own tokens: there the sum becomes a gather
    gathered = num_moe_layers(spec) if layout.ep > 1 else 0
    shared = gathered if spec.moe and spec.moe.shared_intermediate_size else 0
    sums = 2 * spec.num_layers - gathered + shared
    if layout.sp:
        share = -(-tokens // layout.tp) * row
        yield Crossing("reduce_scatter", sums + 1, share * layout.tp, "partial sums of attention, MLP and embedding")
        yield Crossing("all_gather", sums + 1, share, "hidden states before attention, MLP and head")
    else:
        yield Crossing("all_reduce", sums, size, "partial sums of attention and MLP")
        yield Crossing("all_reduce", 1, size, "embedding rows from whoever has them")
        if gathered:
            own = -(-tokens // layout.tp) * row
            yield Crossing("all_gather", gathered, own, "expert outputs of the rank's tokens")
    logits = step.num_logits * (padded_vocab(spec, layout.tp) // layout.tp) * dtype_bytes
    yield Crossing("gather", 1, logits, "logits to the sampling rank")


def _pcp(layout: Layout, spec: ModelSpec, step: StepShape, dtype_bytes: int) -> Iterator[Crossing]:
    if not step.prefill_tokens:
        return
    heads_here = max(1, spec.num_cached_heads // layout.tp)
    tokens = -(-step.prefill_tokens // layout.pcp)
    size = tokens * heads_here * spec.cached_dim * dtype_bytes
    if layout.ring:
        hops = spec.num_layers * (layout.pcp - 1)
        yield Crossing("isend", hops, size, "keys and values to the next rank of the ring")
    else:
        yield Crossing("all_gather", spec.num_layers, size, "keys and values of the rank's own positions")


def _pp(layout: Layout, spec: ModelSpec, step: StepShape, dtype_bytes: int) -> Iterator[Crossing]:
    tokens = rank_tokens(layout, step)
    if layout.sp:
        tokens = -(-tokens // layout.tp)
    yield Crossing("isend", layout.pp - 1, tokens * spec.hidden_size * dtype_bytes, "hidden states to the next stage")


def _dcp(layout: Layout, spec: ModelSpec, step: StepShape, dtype_bytes: int) -> Iterator[Crossing]:
    if not step.decode_seqs:
        return
    spanned_tp = 1 if layout.pcp > 1 and layout.dcp == layout.pcp else layout.dcp // layout.pcp
    heads = spec.num_heads // layout.tp * spanned_tp
    query_dim = spec.mla.latent_dim if spec.mla else spec.head_dim
    out_dim = spec.mla.kv_lora_rank if spec.mla else spec.head_dim
    rows = step.decode_seqs * heads
    if spanned_tp > 1:
        own = rows // spanned_tp * query_dim * dtype_bytes
        yield Crossing("all_gather", spec.num_layers, own, "queries of the rank's own heads")
    yield Crossing("all_gather", spec.num_layers, 2 * rows * MERGE_BYTES, "maximum and sum of the rank's share")
    merge = "reduce_scatter" if spanned_tp > 1 and layout.pcp == 1 else "all_reduce"
    yield Crossing(merge, spec.num_layers, rows * out_dim * MERGE_BYTES, "weighted values of the rank's share")


def _ep(layout: Layout, spec: ModelSpec, step: StepShape, dtype_bytes: int) -> Iterator[Crossing]:
    if spec.moe is None:
        return
    tokens = -(-rank_tokens(layout, step) // layout.tp)
    rows, count = tokens * spec.moe.top_k, num_moe_layers(spec)
    there = rows * (spec.hidden_size + EXPERT_LABEL) * dtype_bytes
    yield Crossing("all_to_all", count, there, "tokens to the owners of their experts")
    yield Crossing("all_to_all", count, rows * spec.hidden_size * dtype_bytes, "expert outputs back")


_AXIS_TRAFFIC: dict[str, Callable[[Layout, ModelSpec, StepShape, int], Iterator[Crossing]]] = {
    "tp": _tp,
    "pcp": _pcp,
    "pp": _pp,
    "dcp": _dcp,
    "ep": _ep,
}


def axis_traffic(
    axis: str, layout: Layout, spec: ModelSpec, step: StepShape, dtype_bytes: int
) -> tuple[Crossing, ...]:
    """The operations of one axis in one step; none at degree 1, and none ever on dp."""
    if getattr(layout, axis) == 1 or axis not in _AXIS_TRAFFIC:
        return ()
    crossings = _AXIS_TRAFFIC[axis](layout, spec, step, dtype_bytes)
    return tuple(crossing for crossing in crossings if crossing.count and crossing.bytes_each)
