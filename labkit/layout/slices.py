"""Which slice of which tensor a rank loads: the tensor table of a model read through a layout.

A slice is one range along one dimension of a Hugging Face tensor, so a rank reads only that from a
memory-mapped file. Fused weights are never cut as one block: gate and up are two tensors here, each cut, and
joined by who wants to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from labkit.layout.grid import Layout
from labkit.layout.ownership import (
    experts,
    is_first_stage,
    is_last_stage,
    kv_replicas,
    layers,
    vocab_rows,
)
from labkit.layout.placement import LayerPlacements
from labkit.model.shapes import ModelSpec
from labkit.model.tensors import (
    EXPERTS,
    INTERMEDIATE,
    KV_HEADS,
    VOCAB,
    Tensor,
    cut_items,
    embedding_tensor,
    expert_tensors,
    final_norm_tensor,
    head_tensor,
    layer_common_tensors,
    layer_tensors,
)


class WeightSlice(NamedTuple):
    """[start, stop) along `dim` of the tensor of full `shape`; dim None: the whole of it.

    `pad_to`: the rank's extent along dim when it is more than stop − start (rows of zeros follow: vocabulary
    padding). `replicated_over`: how many of the tp·pcp ranks of its replica's stage hold the same slice.
    """

    part: str
    shape: tuple[int, ...]
    dim: int | None
    start: int
    stop: int
    pad_to: int | None
    replicated_over: int

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape that the rank holds, padding included."""
        if self.dim is None:
            return self.shape
        extent = self.pad_to or self.stop - self.start
        return self.shape[: self.dim] + (extent,) + self.shape[self.dim + 1 :]

    @property
    def num_elements(self) -> int:
        product = 1
        for extent in self.local_shape:
            product *= extent
        return product


def rank_experts(
    layout: Layout, spec: ModelSpec, rank: int, layer: int, placements: LayerPlacements = ()
) -> Sequence[int]:
    """The routed experts of a layer on a rank: as placed, else its plain share."""
    if layer < len(placements) and placements[layer]:
        return placements[layer][layout.index_in("ep", rank)]
    return experts(layout, spec, rank)


def rank_tensors(
    layout: Layout, spec: ModelSpec, rank: int, placements: LayerPlacements = ()
) -> Iterator[Tensor]:
    """The tensors of which a rank holds a slice. With tied embeddings a last stage of its own lists a copy as
    head.
    """
    if is_first_stage(layout, rank):
        yield embedding_tensor(spec)
    for layer in layers(layout, spec, rank):
        yield from layer_tensors(spec, layer, rank_experts(layout, spec, rank, layer, placements))
    if is_last_stage(layout, rank):
        yield final_norm_tensor(spec)
        if not (spec.tie_word_embeddings and is_first_stage(layout, rank)):
            yield head_tensor(spec)


def slice_tensor(layout: Layout, spec: ModelSpec, rank: int, tensor: Tensor) -> WeightSlice:
    """The rank's slice of one tensor of `rank_tensors`."""
    if tensor.part == EXPERTS and layout.ep > 1:  # the owner of an expert holds all of it, alone in its stage
        return _whole(tensor, 1)
    if tensor.dim is None:
        return _whole(tensor, layout.ranks_per_stage)
    if tensor.cut == VOCAB:
        return _vocab_slice(layout, spec, rank, tensor)
    copies = kv_replicas(layout, spec) if tensor.cut == KV_HEADS else 1
    num_slices, at = layout.tp // copies, layout.coords(rank).tp // copies
    padded = spec.quantization and spec.quantization.padded and spec.quantization.covers(tensor.part)
    if padded and tensor.cut == INTERMEDIATE and num_slices > 1:
        return _padded_slice(layout, spec, tensor, at)
    extent = cut_items(spec, tensor) // num_slices * (tensor.shape[tensor.dim] // cut_items(spec, tensor))
    start = at * extent
    return WeightSlice(
        tensor.part, tensor.shape, tensor.dim, start, start + extent, None, copies * layout.pcp
    )


def _padded_slice(layout: Layout, spec: ModelSpec, tensor: Tensor, at: int) -> WeightSlice:
    """Whole groups of columns, the same number on every rank: the last ranks hold padding for those that are not
    there (gpt-oss in vLLM: 90 groups of 32 over tp 8 are 12 a rank, 6 on the last).
    """
    assert tensor.dim is not None and spec.quantization is not None
    whole, group = tensor.shape[tensor.dim], max(spec.quantization.group)
    num_groups = -(-whole // group)
    extent = -(-num_groups // layout.tp) * group
    start, stop = min(at * extent, whole), min((at + 1) * extent, whole)
    pad_to = extent if stop - start < extent else None
    return WeightSlice(tensor.part, tensor.shape, tensor.dim, start, stop, pad_to, layout.pcp)


def _whole(tensor: Tensor, copies: int) -> WeightSlice:
    return WeightSlice(tensor.part, tensor.shape, None, 0, tensor.shape[0], None, copies)


def _vocab_slice(layout: Layout, spec: ModelSpec, rank: int, tensor: Tensor) -> WeightSlice:
    rows = vocab_rows(layout, spec, rank)
    start, stop = min(rows.start, spec.vocab_size), min(rows.stop, spec.vocab_size)
    pad_to = len(rows) if stop - start < len(rows) else None
    return WeightSlice(tensor.part, tensor.shape, tensor.dim, start, stop, pad_to, layout.pcp)


def weight_slices(
    layout: Layout, spec: ModelSpec, rank: int, placements: LayerPlacements = ()
) -> dict[str, WeightSlice]:
    """HF tensor name → the slice that `rank` loads; only what it owns. `placements`: experts placed otherwise
    than in plain order, by layer.

    Tied embeddings with pp > 1: the last stage lists the embedding's name with part "head". With pp 1 the
    tied embedding is listed once, as "embedding". The layout must be legal for the model (`require_legal`).
    """
    return {t.name: slice_tensor(layout, spec, rank, t) for t in rank_tensors(layout, spec, rank, placements)}


def slice_bytes(spec: ModelSpec, tensor: Tensor, piece: WeightSlice, dtype_bytes: int) -> int:
    if is_quantised(spec, tensor):
        assert spec.quantization is not None
        return spec.quantization.num_bytes(piece.local_shape)
    return piece.num_elements * dtype_bytes


def is_quantised(spec: ModelSpec, tensor: Tensor) -> bool:
    return tensor.linear and spec.quantization is not None and spec.quantization.covers(tensor.part)


def counted_tensors(layout: Layout, spec: ModelSpec, rank: int) -> Iterator[tuple[Tensor, int]]:
    """The tensors of a rank with how many times their like occurs: layers of one kind, and experts, are
    alike.

    Sums over this equal sums over `rank_tensors` and take a thousandth of the time on a model with many
    experts.
    """
    if is_first_stage(layout, rank):
        yield embedding_tensor(spec), 1
    mine = layers(layout, spec, rank)
    kinds = spec.layer_kinds(mine)
    for kind, num_layers in sorted(kinds.items()):
        yield from ((tensor, num_layers) for tensor in layer_common_tensors(spec, *kind))
    num_moe = kinds[True, False] + kinds[True, True]
    num_experts = num_moe * len(experts(layout, spec, rank))
    if num_experts:
        yield from ((tensor, num_experts) for tensor in expert_tensors(spec, 0))
    if is_last_stage(layout, rank):
        yield final_norm_tensor(spec), 1
        if not (spec.tie_word_embeddings and is_first_stage(layout, rank)):
            yield head_tensor(spec), 1


def rank_memory(layout: Layout, spec: ModelSpec, rank: int, dtype_bytes: int) -> dict[str, int]:
    """Part → weight bytes on a rank. Quantised linear weights count their bits and scales, the rest
    `dtype_bytes`.
    """
    total: Counter[str] = Counter()
    for tensor, times in counted_tensors(layout, spec, rank):
        piece = slice_tensor(layout, spec, rank, tensor)
        total[tensor.part] += times * slice_bytes(spec, tensor, piece, dtype_bytes)
    return dict(total)


def kv_bytes_per_token(layout: Layout, spec: ModelSpec, rank: int, dtype_bytes: int) -> int:
    """KV bytes that a token of context leaves on a rank, copies of KV heads counted; with dcp the mean,
    rounded up.
    """
    heads_here = max(1, spec.num_cached_heads // layout.tp)
    cached_layers = sum(not spec.is_linear_layer(layer) for layer in layers(layout, spec, rank))
    whole = cached_layers * heads_here * spec.cached_dim * dtype_bytes
    return -(-whole // layout.dcp)
