"""Attention over a paged cache: decodes of about one length in one batch, each prompt chunk by itself.

A decode has one query, so its cost is reading keys and values: the blocks of a group are gathered to the
width of its longest, and a mask hides the rest. A chunk of a prompt has many queries; a first chunk sees only
itself and needs no cache. Query heads that share a KV head are rows of one small product, so no key is copied
for them. Shapes: T tokens, S sequences, K kv heads, G query heads for each, L positions, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.model.kv_cache import KVCache

if TYPE_CHECKING:
    from labkit.parallel.context import ContextBatch


@dataclass(slots=True)
class Chunk:
    """Rows [start, stop) of the step: the next tokens of one prompt, after `context` in the cache."""

    start: int
    stop: int
    context: int
    blocks: Tensor
    """int64 [ceil((context + tokens) / block_size)]."""
    masks: dict[int | None, Tensor | None]
    """Window of a layer → bool [tokens, context + tokens], True where a query may look; None: causal, no
    context.
    """


@dataclass(slots=True)
class Decodes:
    """Sequences with one query each, of about one length; a step's decodes are its last rows."""

    num_seqs: int
    rows: Tensor | None
    """int64 [num_seqs]: which of the step's decodes; None: all of them, in order."""
    blocks: Tensor
    """int64 [num_seqs · width]: each sequence's blocks, padded to one width with any valid block."""
    masks: dict[int | None, Tensor]
    """Window of a layer → [1, num_seqs, 1, width · block_size], 0 or −∞, in the dtype of the queries."""


@dataclass(slots=True)
class Batch:
    """One step, as tensors. Rows are tokens: chunks first, in order, then decodes."""

    token_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]."""
    slots: Tensor
    """int64 [T]: where each token's keys and values go."""
    chunks: list[Chunk]
    decodes: list[Decodes]
    logit_rows: Tensor | None
    """int64: rows whose logits are wanted; None: all of them."""
    context: ContextBatch | None = None
    """How positions are shared out over ranks; None: every rank has all of them."""

    @property
    def has_prompts(self) -> bool:
        """Whether the step reads prompts, on whichever rank."""
        return bool(self.chunks) or (self.context is not None and self.context.has_prompts)


def chunk_mask(num_tokens: int, context: int, window: int | None, device: torch.device) -> Tensor | None:
    """What each query of a chunk may see: itself, what came before, and no further back than `window`."""
    if context == 0 and (window is None or num_tokens <= window):
        return None
    mask = torch.ones(num_tokens, context + num_tokens, dtype=torch.bool, device=device).tril_(context)
    return mask if window is None else mask.triu_(context - window + 1)


def decode_mask(positions: Tensor, keys: int | Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where the query at positions[s] may see key l, −∞ elsewhere: [1, S, 1, L].

    keys: their positions, or how many there are, from position 0 on.
    """
    if isinstance(keys, int):
        keys = torch.arange(keys, device=positions.device)
    last = positions.unsqueeze(1)
    hidden = keys > last
    if window is not None:
        hidden |= keys <= last - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(hidden, float("-inf")).view(1, len(positions), 1, len(keys))


def attend(cache: KVCache, slot: int, window: int | None, queries: Tensor, keys_values: Tensor, batch: Batch) -> Tensor:
    """queries [T, K·G, D], keys_values [T, 2K, D] (already rotated) → [T, K·G·D]; stores the new keys and
    values.

    slot: the layer's place in the cache; window: how far back it sees, None for all the way.
    """
    if batch.context is not None:
        return batch.context.attend(cache, slot, window, queries, keys_values, batch)
    cache.write(slot, keys_values, batch.slots)
    return attend_stored(cache, slot, window, queries, keys_values, batch)


def attend_stored(
    cache: KVCache, slot: int, window: int | None, queries: Tensor, keys_values: Tensor, batch: Batch
) -> Tensor:
    """`attend`, when the step's keys and values are in the cache already."""
    parts = [_attend_chunk(cache, slot, window, queries, keys_values, chunk) for chunk in batch.chunks]
    if batch.decodes:
        first = batch.chunks[-1].stop if parts else 0
        parts.append(attend_decodes(cache, slot, window, queries[first:], batch.decodes))
    if not parts:  # a rank whose share of a short prompt is empty
        return queries.flatten(1)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def attend_decodes(cache: KVCache, slot: int, window: int | None, queries: Tensor, groups: list[Decodes]) -> Tensor:
    if groups[0].rows is None:
        return _attend_group(cache, slot, window, queries, groups[0])
    out = torch.empty_like(queries).flatten(1)
    for group in groups:
        assert group.rows is not None
        theirs = queries.index_select(0, group.rows)
        out.index_copy_(0, group.rows, _attend_group(cache, slot, window, theirs, group))
    return out


def _attend_group(cache: KVCache, slot: int, window: int | None, queries: Tensor, group: Decodes) -> Tensor:
    keys, values = cache.gather(slot, group.blocks, group.num_seqs)
    grouped = queries.unflatten(1, (cache.num_kv_heads, -1)).transpose(0, 1)  # K S G D
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=group.masks[window])
    return out.transpose(0, 1).reshape(group.num_seqs, -1)


def _attend_chunk(
    cache: KVCache, slot: int, window: int | None, queries: Tensor, keys_values: Tensor, chunk: Chunk
) -> Tensor:
    rows, num_kv_heads = slice(chunk.start, chunk.stop), cache.num_kv_heads
    grouped = queries[rows].unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)  # K G T D
    if chunk.context == 0:
        new = keys_values[rows].transpose(0, 1).unsqueeze(1)  # 2K 1 T D
        keys, values = new[:num_kv_heads], new[num_kv_heads:]
    else:
        num_keys = chunk.context + chunk.stop - chunk.start
        keys, values = (t[:, :, :num_keys] for t in cache.gather(slot, chunk.blocks, 1))  # K 1 L D
    keys, values = (t.expand(-1, grouped.shape[1], -1, -1) for t in (keys, values))
    mask = chunk.masks[window]
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, is_causal=mask is None)
    return out.permute(2, 0, 1, 3).reshape(chunk.stop - chunk.start, -1)
