"""A step's message becomes tensors: positions, cache slots, block tables, masks, rows that need logits.

All of it is worked out once a step in NumPy, for every layer to use. A message holds flat int32 arrays, so
nothing here loops over tokens; prompt chunks are few and get an entry each, decodes form rectangles, padded
to their longest: one when lengths are alike, more when the padding would cost more than another rectangle.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from labkit.engine.messages import Step
from labkit.model.attention import Batch, Chunk, Decodes, chunk_mask, decode_mask

if TYPE_CHECKING:
    from labkit.parallel.context import ContextRanks

Ints = npt.NDArray[np.int64]

GROUP_COST_BLOCKS = 16
"""Blocks that could be read in the time that one more group's calls take (50 µs a layer on a CPU)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a batch must fit: the cache's blocks, the attention windows in use, where tensors live."""

    block_size: int
    """Positions of a block, over all ranks that share it."""
    spare_block: int
    windows: tuple[int | None, ...]
    dtype: torch.dtype
    device: torch.device
    context: ContextRanks | None = None
    """With whom positions are shared out; None: this rank has all of them."""

    @property
    def stored_block(self) -> int:
        """Positions of a block that this rank stores."""
        return self.block_size if self.context is None else self.block_size // self.context.dcp.size

    def slots(self, blocks: Ints, positions: Ints) -> Ints:
        """Where the keys and values of a position go, whose block is given; another rank's, to the spare block."""
        offsets, stored = positions % self.block_size, self.stored_block
        slots = blocks * stored + offsets % stored
        if self.context is None or self.context.dcp.size == 1:
            return slots
        return np.where(offsets // stored == self.context.dcp.rank, slots, self.spare_block * stored)

    def key_positions(self, num_blocks: int) -> Ints:
        """The positions of what this rank stores of a sequence's first blocks, in the order of the cache."""
        member = 0 if self.context is None else self.context.dcp.rank
        starts = np.arange(num_blocks)[:, None] * self.block_size + member * self.stored_block
        return (starts + np.arange(self.stored_block)).ravel()


@dataclass(frozen=True, slots=True)
class Rows:
    """A step's arrays, as the message has them; `table_starts[s]` is where sequence s's blocks begin in
    `blocks`.
    """

    token_ids: Ints
    query_lens: Ints
    context_lens: Ints
    blocks: Ints
    table_lens: Ints
    starts: Ints
    table_starts: Ints
    num_prefills: int

    @classmethod
    def of(cls, step: Step, block_size: int) -> Rows:
        """Raises ValueError when the arrays' lengths contradict each other."""
        token_ids, query_lens, context_lens, blocks = (
            np.frombuffer(raw, dtype="<i4").astype(np.int64)
            for raw in (step.token_ids, step.query_lens, step.context_lens, step.block_tables)
        )
        table_lens = -(-(context_lens + query_lens) // block_size)
        if len(token_ids) != query_lens.sum() or len(blocks) != table_lens.sum():
            raise ValueError(
                f"step {step.step_id} has {len(token_ids)} token ids for {query_lens.sum()} queries and "
                f"{len(blocks)} blocks where {table_lens.sum()} are needed: the plan contradicts itself"
            )
        starts, table_starts = _starts(query_lens), _starts(table_lens)
        num_prefills = step.num_prefill_seqs
        return cls(token_ids, query_lens, context_lens, blocks, table_lens, starts, table_starts, num_prefills)

    def places(self, shape: Shape) -> tuple[Ints, Ints]:
        """Of every token: its position, and its slot in this rank's cache."""
        seq_of = np.repeat(np.arange(len(self.query_lens)), self.query_lens)
        positions = np.arange(len(self.token_ids)) - self.starts[seq_of] + self.context_lens[seq_of]
        in_table = self.table_starts[seq_of] + positions // shape.block_size
        return positions, shape.slots(self.blocks[in_table], positions)

    def sampled_rows(self, step: Step) -> Ints:
        """The last token of each sequence that gets a sample, in the order of the specs."""
        sampled = np.fromiter((spec.index for spec in step.sample), dtype=np.int64, count=len(step.sample))
        return (self.starts + self.query_lens - 1)[sampled]


def _starts(lengths: Ints) -> Ints:
    return np.cumsum(lengths) - lengths


def build(step: Step, shape: Shape) -> Batch:
    rows = Rows.of(step, shape.block_size)
    if shape.context is not None:  # it stands on this module, as one reading of the same arrays
        from labkit.engine.context_batches import build_shared

        return build_shared(step, rows, shape)
    num_tokens = len(rows.token_ids)
    positions, slots = rows.places(shape)
    logit_rows = rows.sampled_rows(step)
    everything = len(logit_rows) == num_tokens and bool((logit_rows == np.arange(num_tokens)).all())
    return Batch(
        token_ids=tensor(rows.token_ids, shape),
        positions=tensor(positions, shape),
        slots=tensor(slots, shape),
        chunks=[_chunk(rows, seq, shape) for seq in range(rows.num_prefills)],
        decodes=decode_groups(rows, shape),
        logit_rows=None if everything else tensor(logit_rows, shape),
    )


def tensor(array: Ints, shape: Shape) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(shape.device, non_blocking=True)


def _chunk(rows: Rows, seq: int, shape: Shape) -> Chunk:
    start, length = int(rows.starts[seq]), int(rows.query_lens[seq])
    context, first = int(rows.context_lens[seq]), int(rows.table_starts[seq])
    blocks = tensor(rows.blocks[first : first + int(rows.table_lens[seq])], shape)
    masks = {window: chunk_mask(length, context, window, shape.device) for window in shape.windows}
    return Chunk(start, start + length, context, blocks, masks)


def decode_groups(rows: Rows, shape: Shape) -> list[Decodes]:
    widths = rows.table_lens[rows.num_prefills :]
    if not len(widths):
        return []
    table = padded_table(rows, int(widths.max()), shape.spare_block)
    positions = rows.context_lens[rows.num_prefills :]
    groups = alike(widths)
    if len(groups) == 1:
        return [_group(None, table, positions, shape)]
    return [_group(members, table[members, : widths[members].max()], positions, shape) for members in groups]


def _group(members: Ints | None, table: Ints, positions: Ints, shape: Shape) -> Decodes:
    mine = tensor(positions if members is None else positions[members], shape)
    masks = decode_masks(mine, table.shape[1], shape)
    rows = None if members is None else tensor(members, shape)
    return Decodes(len(table), rows, tensor(table.ravel(), shape), masks)


def alike(widths: Ints) -> list[Ints]:
    """Which decodes to attend together: a group reads as many blocks for each as its longest has.

    Going up in width, a new group begins where padding those before would read more than a group costs.
    """
    order = np.argsort(widths, kind="stable")
    ordered = widths[order]
    if (ordered[-1] - ordered[0]) * len(order) <= GROUP_COST_BLOCKS:
        return [order]
    cuts, start = [], 0
    for at in range(1, len(order)):
        if (ordered[at] - ordered[at - 1]) * (at - start) > GROUP_COST_BLOCKS:
            cuts.append(at)
            start = at
    return np.split(order, cuts)


def padded_table(rows: Rows, width: int, filler: int) -> Ints:
    """[decodes, width]: each decode's blocks, then `filler`."""
    table_lens = rows.table_lens[rows.num_prefills :]
    table = np.full((len(table_lens), width), filler, dtype=np.int64)
    first = rows.table_starts[rows.num_prefills] if len(table_lens) else 0
    table[np.arange(width) < table_lens[:, None]] = rows.blocks[first:]
    return table


def decode_masks(positions: torch.Tensor, width: int, shape: Shape) -> dict[int | None, torch.Tensor]:
    whole = shape.stored_block == shape.block_size
    keys = width * shape.block_size if whole else tensor(shape.key_positions(width), shape)
    return {window: decode_mask(positions, keys, window, shape.dtype) for window in shape.windows}


def windows_of(windows: Iterable[int | None]) -> tuple[int | None, ...]:
    """The different windows, in a fixed order."""
    return tuple(dict.fromkeys(windows))
