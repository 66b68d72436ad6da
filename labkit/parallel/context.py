"""Context parallelism: a sequence's positions shared out, its queries while a prompt is read (pcp), its keys
and values while they are stored (dcp).

pcp: each rank computes an early and a late part of every prompt chunk, and needs the keys and values of all
of it. They are gathered at once, or circulate (`ring`) and are attended as they arrive. dcp: a rank stores
some of the positions, so every query goes to all of them and the partial results are merged. A decode is
computed on every pcp rank alike. The model knows none of this: its attention hands a step over to the
`ContextBatch` that came with it. Shapes: R rows of this rank, H query heads, K kv heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from labkit.layout import Layout
from labkit.model.attention import Batch, Decodes, attend_decodes, attend_stored
from labkit.model.kv_cache import KVCache
from labkit.parallel.partial import (
    Partial,
    attend_each,
    attend_partly,
    empty_partial,
    merge_across,
    merge_partials,
)

if TYPE_CHECKING:
    from labkit.parallel.comm import Group, Pending
    from labkit.parallel.mesh import Mesh

Masks = dict[int | None, Tensor | None]
"""Window of a layer → [queries, keys], 0 or −∞; None where nothing is hidden."""


class ContextRanks:
    """This rank's place among those that share positions out, and its ways to them."""

    def __init__(self, mesh: Mesh) -> None:
        layout: Layout = mesh.layout
        self.pcp: Group = mesh.pcp
        self.dcp: Group = mesh.dcp
        self.ring = layout.ring
        self.layout = layout
        self.spans_tp = layout.dcp > 1 and layout.dcp != layout.pcp
        """Whether members of the dcp group hold different query heads."""
        self.query_group: Group | None = None
        """Who must be asked for their queries before a decode."""
        if self.spans_tp:
            self.query_group = mesh.dcp if layout.pcp == 1 else mesh.tp
        self.member_pcp = [layout.coords(rank).pcp for rank in layout.group_of("dcp", mesh.rank)]
        """Of each member of the dcp group: whose rows of a prompt it computes."""

    @classmethod
    def of(cls, mesh: Mesh) -> ContextRanks | None:
        """None where every rank has all positions."""
        return cls(mesh) if mesh.layout.pcp > 1 or mesh.layout.dcp > 1 else None


@dataclass(slots=True)
class Look:
    """Some of this rank's queries at some keys: rows of the step's, and rows of a source's."""

    rows: slice
    keys: slice
    causal: bool
    masks: Masks


@dataclass(slots=True)
class History:
    """What queries of one prompt see of the cache: the positions before the step that this rank stores."""

    rows: slice | Tensor
    """Of this rank's rows; with dcp, of the rows gathered from all members."""
    blocks: Tensor
    num_keys: int
    masks: Masks


@dataclass(slots=True)
class HistoryRows:
    """With dcp: which rows of each member ask for history, so that they can be gathered at one length."""

    own: Tensor
    """int64: this rank's rows that have any."""
    padded: int
    """The most that a member has."""


@dataclass(slots=True)
class ContextBatch:
    """How one step is shared out; `engine.context_batches` works it out, once for all layers."""

    ranks: ContextRanks
    num_rows: int
    """Rows of prompts on this rank; its decodes follow them."""
    rows_of: list[int]
    """Rows of prompts on each pcp rank."""
    order: Tensor | None
    """Into the gathered (padded) rows of all pcp ranks → the step's order; None: they are in it already."""
    slots_of: list[Tensor]
    """For the ring: where the keys and values of each pcp rank's rows go."""
    decode_slots: Tensor
    looks: list[list[Look]]
    """By source: each pcp rank in a ring, else the one of all new keys in the step's order."""
    histories: list[History]
    history_rows: HistoryRows | None
    has_prompts: bool

    def attend(
        self, cache: KVCache, slot: int, window: int | None, queries: Tensor, keys_values: Tensor, batch: Batch
    ) -> Tensor:
        """As `labkit.model.attention.attend`, for one layer: [R, H, D], [R, 2K, D] → [R, H·D]."""
        layer = _Layer(self, cache, slot, window)
        if self.ranks.dcp.size == 1 and not self.ranks.ring:
            cache.write(slot, self.all_keys_values(keys_values), batch.slots)
            return attend_stored(cache, slot, window, queries, keys_values, batch)
        parts = []
        if self.has_prompts:
            parts.append(layer.prompts(queries[: self.num_rows], keys_values[: self.num_rows]).flatten(1))
        if batch.decodes:
            cache.write(slot, keys_values[self.num_rows :], self.decode_slots)
            parts.append(layer.decodes(queries[self.num_rows :], batch.decodes))
        return torch.cat([part.to(queries.dtype) for part in parts])

    def all_keys_values(self, keys_values: Tensor) -> Tensor:
        """The step's, in its order: what each pcp rank made of its rows, gathered; then the decodes'."""
        if not self.has_prompts:
            return keys_values
        return torch.cat([self.gather(keys_values[: self.num_rows]), keys_values[self.num_rows :]])

    def gather(self, mine: Tensor) -> Tensor:
        """Prompts' rows of all pcp ranks, in the step's order."""
        if self.order is None:
            return mine
        return self.ranks.pcp.all_gather(padded(mine, max(self.rows_of))).index_select(0, self.order)


def padded(rows: Tensor, count: int) -> Tensor:
    """`rows`, then zeros up to `count`: what is gathered has one shape on all ranks."""
    if len(rows) == count:
        return rows.contiguous()
    whole = rows.new_zeros((count, *rows.shape[1:]))
    whole[: len(rows)] = rows
    return whole


def by_head(keys_values: Tensor) -> tuple[Tensor, Tensor]:
    """[L, 2K, D] → keys and values, each [K, L, D]."""
    num_kv_heads = keys_values.shape[1] // 2
    turned = keys_values.transpose(0, 1)
    return turned[:num_kv_heads], turned[num_kv_heads:]


def grouped(queries: Tensor, num_kv_heads: int) -> Tensor:
    """[T, K·G, D] → [K, G, T, D]."""
    return queries.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)


class _Layer:
    """One layer's attention within a step."""

    def __init__(self, step: ContextBatch, cache: KVCache, slot: int, window: int | None) -> None:
        self.step, self.ranks, self.cache = step, step.ranks, cache
        self.slot, self.window = slot, window
        self.num_kv_heads = cache.num_kv_heads

    # ---- prompts

    def prompts(self, queries: Tensor, keys_values: Tensor) -> Tensor:
        """float32 [R, H, D] of this rank's rows of prompts; stores the new keys and values."""
        seen = empty_partial(queries.shape[:2], queries.shape[2], queries.device)
        self._see_history(seen, queries)
        if self.ranks.ring and self.ranks.pcp.size > 1:
            self._see_ring(seen, queries, keys_values.contiguous())
        else:
            everything = self.step.gather(keys_values)
            self.cache.write(self.slot, everything, self.step.slots_of[0])
            self._see(seen, queries, everything, self.step.looks[0])
        return seen.finish()

    def _see(self, seen: Partial, queries: Tensor, keys_values: Tensor, looks: list[Look]) -> None:
        keys, values = by_head(keys_values)
        for look in looks:
            mask = look.masks[self.window]
            part = attend_partly(
                grouped(queries[look.rows], self.num_kv_heads), keys[:, look.keys], values[:, look.keys],
                mask, look.causal and mask is None,
            )  # fmt: skip
            _add(seen, look.rows, part)

    def _see_ring(self, seen: Partial, queries: Tensor, keys_values: Tensor) -> None:
        """In round r this rank attends to what came from the rank r before it, while it passes it on."""
        group, step = self.ranks.pcp, self.step
        for turn in range(group.size):
            source = (group.rank - turn) % group.size
            next_rows = step.rows_of[(source - 1) % group.size] if turn < group.size - 1 else None
            pending, coming = self._pass_on(keys_values, next_rows)
            self.cache.write(self.slot, keys_values, step.slots_of[source])
            self._see(seen, queries, keys_values, step.looks[source])
            for transfer in pending:
                transfer.wait()
            keys_values = coming

    def _pass_on(self, keys_values: Tensor, num_coming: int | None) -> tuple[list[Pending], Tensor]:
        """What is under way, the receive first, and where it arrives; num_coming None: the round is over."""
        group = self.ranks.pcp
        if num_coming is None:
            return [], keys_values
        coming = keys_values.new_empty((num_coming, *keys_values.shape[1:]))
        pending: list[Pending] = []
        if len(keys_values):
            pending.append(group.isend(keys_values, (group.rank + 1) % group.size))
        if num_coming:
            pending.append(group.irecv(coming, (group.rank - 1) % group.size))
        return pending[::-1], coming

    def _see_history(self, seen: Partial, queries: Tensor) -> None:
        rows = self.step.history_rows
        if rows is None:
            for history in self.step.histories:
                assert isinstance(history.rows, slice)
                _add(seen, history.rows, self._stored(queries[history.rows], history))
            return
        asked = padded(queries.index_select(0, rows.own), rows.padded)
        asked = self.ranks.dcp.all_gather(asked)
        found = empty_partial(asked.shape[:2], asked.shape[2], asked.device)
        for history in self.step.histories:
            for whole, part in zip(found, self._stored(asked[history.rows], history), strict=True):
                whole[history.rows] = part
        merged = merge_across(self.ranks.dcp, found, scatter=True)
        for whole, part in zip(seen, merged, strict=True):
            whole[rows.own] = part[: len(rows.own)]

    def _stored(self, queries: Tensor, history: History) -> Partial:
        keys, values = self.cache.gather(self.slot, history.blocks, 1)
        keys, values = (t[:, 0, : history.num_keys] for t in (keys, values))
        return attend_partly(grouped(queries, self.num_kv_heads), keys, values, history.masks[self.window])

    # ---- decodes

    def decodes(self, queries: Tensor, groups: list[Decodes]) -> Tensor:
        """[S, H, D] of this rank's heads → [S, H·D]. Where the cache is whole, nothing crosses."""
        ranks, (num_seqs, num_heads, dim) = self.ranks, queries.shape
        if ranks.dcp.size == 1:
            return attend_decodes(self.cache, self.slot, self.window, queries, groups)
        asking = ranks.query_group
        asked = asking.all_gather(queries.contiguous()) if asking else queries
        by_seq = asked.view(-1, num_seqs, num_heads, dim).transpose(0, 1)  # S, members, H, D
        found = empty_partial(by_seq.shape[:3], dim, queries.device)
        for group in groups:
            rows = slice(None) if group.rows is None else group.rows
            for whole, part in zip(found, self._each(by_seq[rows], group), strict=True):
                whole[rows] = part
        found = Partial(*(t.transpose(0, 1).flatten(0, 1) for t in found))
        out = merge_across(ranks.dcp, found, scatter=asking is ranks.dcp).finish().flatten(1)
        return out if len(out) == num_seqs or not asking else out.view(-1, num_seqs, out.shape[1])[asking.rank]

    def _each(self, queries: Tensor, group: Decodes) -> Partial:
        """[S, members, H, D] → Partial over the same, of the keys stored here."""
        num_seqs, num_members, _, dim = queries.shape
        heads = queries.unflatten(2, (self.num_kv_heads, -1)).permute(2, 0, 1, 3, 4)  # K S members G D
        keys, values = self.cache.gather(self.slot, group.blocks, num_seqs)
        parts = attend_each(heads.flatten(2, 3), keys, values, group.masks[self.window])
        return Partial(
            *(t.unflatten(2, (num_members, -1)).permute(1, 2, 0, *range(3, t.dim() + 1)).flatten(2, 3) for t in parts)
        )


def _add(seen: Partial, rows: slice, part: Partial) -> None:
    """Merge a part into the rows of what is there."""
    for whole, merged in zip(seen, merge_partials([seen.at(rows), part]), strict=True):
        whole[rows] = merged
