"""Decode steps of a few fixed sizes, so that a GPU can replay a step as one graph.

A step is padded up to a bucket: more sequences that attend to nothing but the spare block, and a wider block
table. Its inputs are copied into tensors that stay where they are; the same padded forward then runs,
captured on CUDA the first time a bucket is met (lazily: a switch waits for none of them), plain elsewhere, so
that a machine without a GPU tests the padding too. Graphs hold their groups' communicators: destroy them
before the groups.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from labkit.engine.batches import Ints, Rows, Shape, decode_masks, padded_table
from labkit.engine.messages import Step
from labkit.model.attention import Batch, Decodes

Forward = Callable[[Batch, Tensor | None], Tensor | None]

MAX_GRAPHS = 64
"""Graphs kept; the one longest unused goes first."""


def bucket_of(count: int, most: int) -> int:
    """Next power of two up to 8, then the next multiple of 8, at most `most`."""
    size = 1 << (count - 1).bit_length() if count <= 8 else -(-count // 8) * 8
    return max(count, min(size, most))


def width_of(count: int) -> int:
    """Next power of two: block tables grow a step at a time, and each width is a graph of its own."""
    return 1 << (count - 1).bit_length()


class _Bucket:
    """Static inputs of one (sequences, table width), and on CUDA the graph that reads them."""

    def __init__(
        self, num_seqs: int, width: int, shape: Shape, hidden_size: int | None, num_sharers: int
    ) -> None:
        self.num_seqs, self.width, self.shape = num_seqs, width, shape
        self.hidden: Tensor | None = None
        if hidden_size is not None:
            self.hidden = torch.zeros(-(-num_seqs // num_sharers), hidden_size, dtype=shape.dtype, device=shape.device)
        sizes = (num_seqs, num_seqs, num_seqs, num_seqs * width)
        tensors = (torch.zeros(size, dtype=torch.int64, device=shape.device) for size in sizes)
        self.token_ids, self.positions, self.slots, self.blocks = tensors
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None

    def load(self, rows: Rows, hidden: Tensor | None) -> None:
        """Copies a step in; rows beyond it are token 0 at position 0 of the spare block."""
        if self.hidden is not None and hidden is not None:
            self.hidden[: len(hidden)].copy_(hidden)
        filler, size = self.shape.spare_block, self.shape.block_size
        positions = rows.context_lens
        table = np.full((self.num_seqs, self.width), filler, dtype=np.int64)
        table[: len(positions)] = padded_table(rows, self.width, filler)
        slots = table[np.arange(len(positions)), positions // size] * size + positions % size
        _fill(self.token_ids, rows.token_ids, 0)
        _fill(self.positions, positions, 0)
        _fill(self.slots, slots, filler * size)
        _fill(self.blocks, table.ravel(), filler)

    def batch(self) -> Batch:
        """The masks are worked out from the positions inside the forward, so a replay makes them anew."""
        decodes = Decodes(self.num_seqs, None, self.blocks, decode_masks(self.positions, self.width, self.shape))
        return Batch(self.token_ids, self.positions, self.slots, [], [decodes], None)


def _fill(target: Tensor, values: Ints, filler: int) -> None:
    padded = np.full(len(target), filler, dtype=np.int64)
    padded[: len(values)] = values
    target.copy_(torch.from_numpy(padded))


class DecodeGraphs:
    """Runs decode-only steps through padded buckets; `forward` is the decoder's, over one batch.

    hidden_size: of a pipeline stage that begins with hidden states instead of token ids; None on the first.
    num_sharers: ranks over which the rows between stages are shared out (tp with `+sp`, else 1).
    """

    def __init__(
        self, forward: Forward, shape: Shape, max_num_seqs: int, hidden_size: int | None = None, num_sharers: int = 1
    ) -> None:
        self.hidden_size, self.num_sharers = hidden_size, num_sharers
        self.forward, self.shape, self.max_num_seqs = forward, shape, max_num_seqs
        self.captures = shape.device.type == "cuda"
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._memory_pool = torch.cuda.graph_pool_handle() if self.captures else None

    @staticmethod
    def takes(step: Step) -> bool:
        """Decodes alone, each of them sampled in order: what every decode step of the engine is."""
        num_seqs = len(step.query_lens) // 4
        in_order = [spec.index for spec in step.sample] == list(range(num_seqs))
        return step.num_prefill_seqs == 0 and num_seqs > 0 and in_order

    def num_rows(self, num_seqs: int) -> int:
        """Of a step of so many sequences, the rows between stages: without padding, unless it is shared out too."""
        return num_seqs if self.num_sharers == 1 else bucket_of(num_seqs, self.max_num_seqs)

    def run(self, step: Step, hidden: Tensor | None = None) -> Tensor | None:
        """Logits [num_seqs, vocab_size] on the group's first rank, None elsewhere; hidden states before the last
        stage.
        """
        rows = Rows.of(step, self.shape.block_size)
        num_seqs = len(rows.query_lens)
        bucket = self._bucket(bucket_of(num_seqs, self.max_num_seqs), width_of(int(rows.table_lens.max())))
        bucket.load(rows, hidden)
        out = self._replay(bucket) if self.captures else self.forward(bucket.batch(), bucket.hidden)
        # a share of the rows is fewer than the bucket (or both are one row), and goes on with its padding
        return out if out is None or len(out) < bucket.num_seqs else out[:num_seqs]

    def _bucket(self, num_seqs: int, width: int) -> _Bucket:
        key = (num_seqs, width)
        bucket = self._buckets.pop(key, None) or _Bucket(
            num_seqs, width, self.shape, self.hidden_size, self.num_sharers
        )
        if len(self._buckets) >= MAX_GRAPHS:
            del self._buckets[next(iter(self._buckets))]
        self._buckets[key] = bucket
        return bucket

    def _replay(self, bucket: _Bucket) -> Tensor | None:
        if bucket.graph is None:
            self._capture(bucket)
        else:
            bucket.graph.replay()
        return bucket.logits

    def _capture(self, bucket: _Bucket) -> None:
        """One plain run on a side stream warms libraries and gives this step's logits; a second one is
        recorded.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.forward(bucket.batch(), bucket.hidden)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory_pool, capture_error_mode="thread_local"):
            bucket.logits = self.forward(bucket.batch(), bucket.hidden)
        bucket.graph = graph
        graph.replay()

    def destroy(self) -> None:
        """Drops every graph. Call before the groups they use are closed."""
        if self.captures:
            torch.cuda.synchronize()
        self._buckets.clear()
