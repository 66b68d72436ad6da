"""Point to point through shared memory: one small queue of chunks for each ordered pair of ranks.

A send copies chunks while there is room and keeps the rest (and the tensor) until there is; a receive takes
them in order. Neither blocks before `wait()`. While a rank waits it also moves its own pending sends along,
so two ranks that send to each other first and receive afterwards do not lock up, whatever the size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from labkit.parallel.shm_block import Block, Waiter, fence

CHUNK_BYTES = 256 << 10
NUM_CHUNKS = 16
"""4 MiB each way: hidden states of a few steps lie here while the next stage is busy."""
_HEAD_BYTES = 128
_CHANNEL_BYTES = _HEAD_BYTES + NUM_CHUNKS * CHUNK_BYTES


class Channels:
    """The queues of one group: rank's `size - 1` outgoing and incoming ones, made when first used."""

    def __init__(self, block: Block, offset: int, ranks: tuple[int, ...], rank: int, waiter: Waiter) -> None:
        self._block, self._offset, self._ranks, self._rank, self._waiter = block, offset, ranks, rank, waiter
        self._queues: dict[tuple[int, int], _Queue] = {}

    @staticmethod
    def num_bytes(size: int) -> int:
        return size * size * _CHANNEL_BYTES

    def send(self, x: Tensor, dst: int) -> _Transfer:
        queue = self._queue(self._rank, dst)
        transfer = _Transfer(self, queue, x.contiguous().view(-1).view(torch.uint8), self._ranks[dst])
        queue.pending.append(transfer)
        self.progress()
        return transfer

    def receive(self, x: Tensor, src: int) -> _Transfer:
        if not x.is_contiguous():
            raise ValueError("irecv writes into a contiguous tensor; pass x.contiguous() and copy afterwards")
        queue = self._queue(src, self._rank)
        transfer = _Transfer(self, queue, x.view(-1).view(torch.uint8), self._ranks[src])
        queue.pending.append(transfer)
        return transfer

    def progress(self) -> None:
        """Move every pending transfer as far as it goes without waiting."""
        for queue in self._queues.values():
            queue.progress()

    def finish(self, transfer: _Transfer) -> None:
        """Wait, chunk by chunk, until the transfer is over."""
        while not transfer.done:
            self.progress()
            if not transfer.done:
                at, value = transfer.queue.next_word()
                self._waiter.until(at, value, transfer.peer, self.progress)

    def _queue(self, src: int, dst: int) -> _Queue:
        queue = self._queues.get((src, dst))
        if queue is None:
            at = self._offset + (src * len(self._ranks) + dst) * _CHANNEL_BYTES
            if src == self._rank:
                self._block.reserve(at, _CHANNEL_BYTES)
            queue = self._queues[src, dst] = _Queue(self._block, at, sends=src == self._rank)
        return queue


class _Queue:
    """Words: chunks written (by the source) and chunks read (by the destination), a cache line each."""

    def __init__(self, block: Block, offset: int, sends: bool) -> None:
        self.pending: deque[_Transfer] = deque()
        self._sends = sends
        self._words = block.words
        self._written, self._read = offset // 8, offset // 8 + 8
        self._count = 0
        chunks = block.tensor(offset + _HEAD_BYTES, NUM_CHUNKS * CHUNK_BYTES, torch.uint8)
        self._chunks = chunks.view(NUM_CHUNKS, CHUNK_BYTES).unbind(0)

    def next_word(self) -> tuple[int, int]:
        """The word, and its value, that lets the next chunk pass."""
        if self._sends:
            return self._read, self._count - NUM_CHUNKS + 1
        return self._written, self._count + 1

    def progress(self) -> None:
        words = self._words
        while self.pending:
            at, value = self.next_word()
            if words[at] < value:
                return
            self._move_one()

    def _move_one(self) -> None:
        if fence is not None:
            fence()
        transfer = self.pending[0]
        piece = next(transfer.pieces)
        chunk = self._chunks[self._count % NUM_CHUNKS][: piece.numel()]
        if self._sends:
            chunk.copy_(piece)
        else:
            piece.copy_(chunk)
        self._count += 1
        transfer.num_left -= 1
        if transfer.done:
            self.pending.popleft()
        if fence is not None:
            fence()
        self._words[self._written if self._sends else self._read] = self._count


class _Transfer:
    """One tensor on its way, in pieces of a chunk; it holds the tensor until it is over."""

    def __init__(self, channels: Channels, queue: _Queue, data: Tensor, peer: int) -> None:
        pieces = data.split(CHUNK_BYTES)
        self.pieces: Iterator[Tensor] = iter(pieces)
        self.num_left = len(pieces)
        self.queue = queue
        self.peer = peer
        self._channels = channels

    @property
    def done(self) -> bool:
        return self.num_left == 0

    def wait(self) -> None:
        self._channels.finish(self)

    def advance(self) -> bool:
        if not self.done:
            self.queue.progress()
        return self.done
