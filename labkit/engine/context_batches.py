"""A step as one rank of a context-parallel layout sees it: which rows it computes, what those look at, where
keys and values go.

Everything follows from the step's arrays and the rank's place, so that all ranks know each other's rows and
nothing about them has to be said. In the order of a rank: of each prompt its early part and its late one,
prompt after prompt, then every decode. With dcp the queries of all members at the history of a prompt stand
together, one member's after another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from labkit.engine.batches import Ints, Rows, Shape, decode_groups, tensor
from labkit.engine.messages import Step
from labkit.layout import zigzag
from labkit.model.attention import Batch, Chunk, chunk_mask
from labkit.parallel.context import ContextBatch, ContextRanks, History, HistoryRows, Look


@dataclass(frozen=True, slots=True)
class _Part:
    """Queries of one prompt's chunk that one pcp rank computes: rows [row, row + length) of that rank's."""

    seq: int
    first: int
    """Offset among the chunk's tokens."""
    length: int
    row: int


class _Sharing:
    """One step's prompts, shared out over `ranks`."""

    def __init__(self, rows: Rows, shape: Shape, ranks: ContextRanks) -> None:
        self.rows, self.shape, self.ranks = rows, shape, ranks
        self.seqs = range(rows.num_prefills)
        self.num_rows = int(rows.query_lens[: rows.num_prefills].sum())
        """Of all prompts in the step."""
        self.parts = [self._parts_of(pcp) for pcp in range(ranks.pcp.size)]
        self.rows_of = [np.concatenate([self._step_rows(p) for p in parts] or [_none()]) for parts in self.parts]
        self.context = rows.context_lens[: rows.num_prefills]
        self.mine = self.parts[ranks.pcp.rank]

    def _parts_of(self, pcp: int) -> list[_Part]:
        parts, row = [], 0
        for seq in self.seqs:
            for queries in zigzag(int(self.rows.query_lens[seq]), self.ranks.pcp.size, pcp):
                if queries:
                    parts.append(_Part(seq, queries.start, len(queries), row))
                    row += len(queries)
        return parts

    def _step_rows(self, part: _Part) -> Ints:
        begin = int(self.rows.starts[part.seq]) + part.first
        return np.arange(begin, begin + part.length)

    # ---- rows

    def own_rows(self) -> Ints:
        """Which of the step's rows this rank computes, in its order."""
        decodes = np.arange(self.num_rows, len(self.rows.token_ids))
        return np.concatenate([self.rows_of[self.ranks.pcp.rank], decodes])

    def order(self) -> Ints | None:
        """For each of the prompts' rows, where it stands in what all pcp ranks gather."""
        if self.ranks.pcp.size == 1 or not self.num_rows:
            return None
        most = max(len(rows) for rows in self.rows_of)
        order = np.empty(self.num_rows, dtype=np.int64)
        for pcp, rows in enumerate(self.rows_of):
            order[rows] = pcp * most + np.arange(len(rows))
        return order

    # ---- what queries look at

    def looks(self) -> list[list[Look]]:
        if not (self.ranks.ring and self.ranks.pcp.size > 1):
            sources = [[_Part(s, 0, int(self.rows.query_lens[s]), int(self.rows.starts[s])) for s in self.seqs]]
            return [self._looks_at(sources[0])]
        return [self._looks_at(parts) for parts in self.parts]

    def _looks_at(self, source: list[_Part]) -> list[Look]:
        """This rank's queries at the new keys of a source: all those before, and among their own the causal."""
        looks = []
        for part in self.mine:
            theirs = [other for other in source if other.seq == part.seq]
            begin = theirs[0].row if theirs else 0
            before = sum(min(max(part.first - other.first, 0), other.length) for other in theirs)
            own = any(other.first <= part.first < other.first + other.length for other in theirs)
            if before:
                keys = np.concatenate([other.first + np.arange(other.length) for other in theirs])[:before]
                looks.append(self._look(part, begin, keys, causal=False))
            if own:
                keys = part.first + np.arange(part.length)
                looks.append(self._look(part, begin + before, keys, causal=True))
        return looks

    def _look(self, part: _Part, begin: int, keys: Ints, causal: bool) -> Look:
        queries = part.first + np.arange(part.length)
        masks = {window: _mask(queries, keys, window, self.shape) for window in self.shape.windows}
        if causal:
            masks = {w: None if w is None or part.length <= w else mask for w, mask in masks.items()}
        return Look(slice(part.row, part.row + part.length), slice(begin, begin + len(keys)), causal, masks)

    # ---- history

    def histories(self) -> list[History]:
        """Of the prompts that have any."""
        asking = self._members_rows()
        most = max((len(rows) for rows in asking), default=0)
        found = []
        for seq in self.seqs:
            if not self.context[seq]:
                continue
            if self.ranks.dcp.size > 1:
                where = [np.flatnonzero(self._seq_of(rows) == seq) + m * most for m, rows in enumerate(asking)]
                offsets = [rows[self._seq_of(rows) == seq] - self.rows.starts[seq] for rows in asking]
                found.append(self._history(seq, np.concatenate(where), np.concatenate(offsets)))
            elif parts := [part for part in self.mine if part.seq == seq]:
                found.append(self._own_history(seq, parts))
        return found

    def history_rows(self) -> HistoryRows | None:
        if self.ranks.dcp.size == 1 or not self.context.any():
            return None
        mine = self._asking(self.ranks.pcp.rank)
        own = np.flatnonzero(np.isin(self.rows_of[self.ranks.pcp.rank], mine))
        return HistoryRows(tensor(own, self.shape), max(len(rows) for rows in self._members_rows()))

    def _members_rows(self) -> list[Ints]:
        return [self._asking(pcp) for pcp in self.ranks.member_pcp] if self.context.any() else []

    def _asking(self, pcp: int) -> Ints:
        """The rows of a pcp rank whose prompts have history."""
        rows = self.rows_of[pcp]
        return rows[self.context[self._seq_of(rows)] > 0]

    def _seq_of(self, rows: Ints) -> Ints:
        return np.searchsorted(self.rows.starts[: self.rows.num_prefills], rows, side="right") - 1

    def _own_history(self, seq: int, parts: list[_Part]) -> History:
        begin, stop = parts[0].row, parts[-1].row + parts[-1].length
        offsets = np.concatenate([part.first + np.arange(part.length) for part in parts])
        return self._history(seq, slice(begin, stop), offsets)

    def _history(self, seq: int, where: Ints | slice, offsets: Ints) -> History:
        context, shape = int(self.context[seq]), self.shape
        num_blocks, first = -(-context // shape.block_size), int(self.rows.table_starts[seq])
        keys = shape.key_positions(num_blocks)
        keys = keys[keys < context]
        queries = context + offsets
        masks = {window: _mask(queries, keys, window, shape) for window in shape.windows}
        rows = where if isinstance(where, slice) else tensor(where, shape)
        blocks = tensor(self.rows.blocks[first : first + num_blocks], shape)
        return History(rows, blocks, len(keys), masks)

    # ---- chunks, where the cache is whole and keys are gathered

    def chunks(self) -> list[Chunk]:
        """This rank's parts, as chunks of their own: each has all that comes before it as context."""
        return [self._chunk(part) for part in self.mine]

    def _chunk(self, part: _Part) -> Chunk:
        shape, first = self.shape, int(self.rows.table_starts[part.seq])
        context = int(self.context[part.seq]) + part.first
        num_blocks = -(-(context + part.length) // shape.block_size)
        blocks = tensor(self.rows.blocks[first : first + num_blocks], shape)
        masks = {window: chunk_mask(part.length, context, window, shape.device) for window in shape.windows}
        return Chunk(part.row, part.row + part.length, context, blocks, masks)


def _none() -> Ints:
    return np.empty(0, dtype=np.int64)


def _mask(queries: Ints, keys: Ints, window: int | None, shape: Shape) -> Tensor | None:
    """[queries, keys], float32: 0 or −∞, by positions; None where nothing is hidden."""
    hidden = keys[None, :] > queries[:, None]
    if window is not None:
        hidden |= keys[None, :] <= queries[:, None] - window
    if not hidden.any():
        return None
    return torch.zeros(hidden.shape).masked_fill_(torch.from_numpy(hidden), float("-inf")).to(shape.device)


def build_shared(step: Step, rows: Rows, shape: Shape) -> Batch:
    """This rank's batch of a step whose positions are shared out; `shape.context` says with whom."""
    assert shape.context is not None
    sharing, ranks = _Sharing(rows, shape, shape.context), shape.context
    positions, slots = rows.places(shape)
    own = sharing.own_rows()
    through_cache = ranks.dcp.size == 1 and not ranks.ring
    context = None if not (sharing.num_rows or ranks.dcp.size > 1) else _context_batch(sharing, slots, through_cache)
    return Batch(
        token_ids=tensor(rows.token_ids[own], shape),
        positions=tensor(positions[own], shape),
        slots=tensor(slots, shape),
        chunks=sharing.chunks() if through_cache else [],
        decodes=decode_groups(rows, shape),
        logit_rows=tensor(_logit_rows(rows.sampled_rows(step), own, ranks), shape),
        context=context,
    )


def _logit_rows(sampled: Ints, own: Ints, ranks: ContextRanks) -> Ints:
    """Where the sampled rows stand among this rank's; the first pcp rank has them all, the others need none."""
    if ranks.pcp.rank:
        return _none()
    order = np.argsort(own)
    return order[np.searchsorted(own, sampled, sorter=order)]


def _context_batch(sharing: _Sharing, slots: Ints, through_cache: bool) -> ContextBatch:
    shape, ranks = sharing.shape, sharing.ranks
    ringing = ranks.ring and ranks.pcp.size > 1
    order = sharing.order()
    sources = sharing.rows_of if ringing else [np.arange(sharing.num_rows)]
    return ContextBatch(
        ranks=ranks,
        num_rows=len(sharing.rows_of[ranks.pcp.rank]),
        rows_of=[len(rows) for rows in sharing.rows_of],
        order=None if order is None else tensor(order, shape),
        slots_of=[tensor(slots[rows], shape) for rows in sources],
        decode_slots=tensor(slots[sharing.num_rows :], shape),
        looks=[] if through_cache else sharing.looks(),
        histories=[] if through_cache else sharing.histories(),
        history_rows=None if through_cache else sharing.history_rows(),
        has_prompts=sharing.num_rows > 0,
    )
