"""Collectives of one host through shared memory: about ten microseconds instead of the half millisecond of
a socket.

Each rank owns two slots and writes them in turn. Call t: write slot t mod 2, set the own word to t, wait
until the others' words are t, read their slots. Two slots suffice, because who writes in call t + 2 has
seen every word at t + 1, and a rank sets t + 1 only when it has read what it wanted of t. Sums are taken in
rank order, so all ranks get the same bits. What does not fit in a slot goes in pieces.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from labkit.parallel.shm_block import Block, Patience, Waiter, fence
from labkit.parallel.shm_channel import Channels
from labkit.parallel.wire import Fabric, Pending, Wire

SLOT_BYTES = 1 << 20
_MAX_PLANS = 256
_Plan = tuple[Tensor, list[Tensor]]
"""For one shape and parity: the own slot, and all ranks' slots in rank order."""


def shm_root(run_dir: Path) -> Path:
    """Where shared files belong: memory where the system has such a folder, else the run's own folder."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else run_dir


class ShmFabric(Fabric):
    """folder: private (0700), the same for all ranks."""

    name = "shm"

    def __init__(self, folder: Path, *, slot_bytes: int = SLOT_BYTES, patience: Patience | None = None) -> None:
        self._folder = folder
        self._slot_bytes = slot_bytes
        self._patience = patience or Patience()

    def open(self, name: str, ranks: tuple[int, ...], rank: int) -> Wire:
        return ShmWire(self._folder / name, ranks, rank, self._slot_bytes, self._patience)

    def suit(self, num_busy_threads: int) -> None:
        self._patience.suit(num_busy_threads)


class ShmWire(Wire):
    """Layout of its file: head | counts of all_to_all, 2 x [size, size] | slots, 2 x size | channels."""

    def __init__(self, path: Path, ranks: tuple[int, ...], rank: int, slot_bytes: int, patience: Patience) -> None:
        super().__init__(ranks, rank)
        size = self.size
        head = Block.head_bytes(size)
        self._slot_bytes = slot_bytes
        self._counts_at = head
        self._slots_at = head + -(-2 * size * size * 8 // 64) * 64
        channels_at = self._slots_at + 2 * size * slot_bytes
        self._block = Block(path, rank, size, channels_at + Channels.num_bytes(size), channels_at)
        self._words = self._block.words
        self._mine = Block.line(rank)
        self._peers = [(Block.line(peer), ranks[peer]) for peer in range(size) if peer != rank]
        self._waiter = Waiter(self._words, Block.line(-1), patience)
        self._channels = Channels(self._block, channels_at, ranks, rank, self._waiter)
        self._tick = 0
        self._plans: dict[tuple[torch.dtype, torch.Size], tuple[_Plan, _Plan]] = {}

    # ---- the protocol: one turn = write, say so, wait

    def _begin(self) -> int:
        """A new call: wait until the slots of the call before the last are free, then take them."""
        tick = self._tick + 1
        self._tick = tick
        self._await(tick - 1)
        return tick

    def _publish(self, tick: int) -> None:
        if fence is not None:
            fence()
        self._words[self._mine] = tick

    def _await(self, tick: int) -> None:
        words = self._words
        for at, peer in self._peers:
            if words[at] < tick:
                self._waiter.until(at, tick, peer)
        if fence is not None:
            fence()

    def _await_one(self, tick: int, peer: int) -> None:
        self._waiter.until(Block.line(peer), tick, self.ranks[peer])
        if fence is not None:
            fence()

    def _share(self, x: Tensor) -> list[Tensor]:
        """Every rank's x, in rank order: views of their slots, good until the next call but one."""
        plan = self._plan(x)
        tick = self._begin()
        own, slots = plan[tick & 1]
        own.copy_(x)
        self._publish(tick)
        self._await(tick)
        return slots

    def _plan(self, x: Tensor) -> tuple[_Plan, _Plan]:
        key = (x.dtype, x.shape)
        plan = self._plans.get(key)
        return plan if plan is not None else self._make_plan(key, x)

    def _make_plan(self, key: tuple[torch.dtype, torch.Size], x: Tensor) -> tuple[_Plan, _Plan]:
        if x.device.type != "cpu":
            raise ValueError(f"the shm fabric moves CPU tensors, got one on {x.device}; use --fabric nccl on GPUs")
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        slots = [
            [self._slot(parity, rank, x.nbytes, x.dtype).view(x.shape) for rank in range(self.size)]
            for parity in (0, 1)
        ]
        self._plans[key] = plan = ((slots[0][self.rank], slots[0]), (slots[1][self.rank], slots[1]))
        return plan

    def _slot(self, parity: int, rank: int, num_bytes: int, dtype: torch.dtype) -> Tensor:
        at = self._slots_at + (parity * self.size + rank) * self._slot_bytes
        return self._block.tensor(at, num_bytes, dtype)

    # ---- collectives

    def all_reduce(self, x: Tensor) -> None:
        if x.nbytes > self._slot_bytes:
            return self._in_pieces(x, self.all_reduce)
        slots = self._share(x)
        if self.size == 2:
            x.add_(slots[1 - self.rank])  # a + b is b + a, bit for bit
            return None
        torch.add(slots[0], slots[1], out=x)
        for slot in slots[2:]:
            x.add_(slot)
        return None

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self._all_of(x), dim)

    def gather(self, x: Tensor) -> list[Tensor] | None:
        gathered: list[Tensor] = []
        for piece in self._pieces(x):
            tick = self._begin()
            own, slots = self._plan(piece)[tick & 1]
            own.copy_(piece)
            self._publish(tick)
            if self.rank == 0:
                self._await(tick)
                gathered.append(torch.stack(slots))
        if self.rank != 0:
            return None
        return [whole.view(x.shape) for whole in torch.cat(gathered, 1).unbind(0)]

    def _all_of(self, x: Tensor) -> list[Tensor]:
        """Every rank's x; views of the slots when it fits in one."""
        if x.nbytes <= self._slot_bytes:
            return self._share(x)
        pieces = [torch.stack(self._share(piece)) for piece in self._pieces(x)]
        return [whole.view(x.shape) for whole in torch.cat(pieces, 1).unbind(0)]

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        parts = torch.stack(x.chunk(self.size, dim))
        flat = parts.view(self.size, -1)
        width = max(1, self._slot_bytes // (self.size * x.element_size()))
        out = torch.empty_like(parts[0])
        sums = out.view(-1)
        for at in range(0, flat.shape[1], width):
            slots = self._share(flat[:, at : at + width])
            target = torch.add(slots[0][self.rank], slots[1][self.rank], out=sums[at : at + width])
            for slot in slots[2:]:
                target.add_(slot[self.rank])
        return out

    def broadcast(self, x: Tensor, src: int) -> None:
        if x.nbytes > self._slot_bytes:
            return self._in_pieces(x, lambda piece: self.broadcast(piece, src))
        tick = self._begin()
        slots = self._plan(x)[tick & 1][1]
        if src == self.rank:
            slots[src].copy_(x)
        self._publish(tick)
        if src != self.rank:
            self._await_one(tick, src)
            x.copy_(slots[src])
        return None

    def barrier(self) -> None:
        tick = self._begin()
        self._publish(tick)
        self._await(tick)

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Bytes per pair are said first, in the counts.

        Then rounds of one sub-slot per pair, as many as the most need.
        """
        own = torch.tensor([part.nbytes for part in parts])
        tick = self._begin()
        counts = self._block.tensor(self._counts_at, 2 * self.size**2 * 8, torch.int64)
        counts = counts.view(2, self.size, self.size)[tick & 1]
        counts[self.rank].copy_(own)
        self._publish(tick)
        self._await(tick)
        counts = counts.clone()
        received = [bytearray(int(count)) for count in counts[:, self.rank]]
        room = self._slot_bytes // self.size // 64 * 64
        outgoing = [part.contiguous().view(-1).view(torch.uint8) for part in parts]
        for at in range(0, int(counts.max()), room):
            self._swap(outgoing, received, at, room)
        return [_from_bytes(data, parts[0]) for data in received]

    def _swap(self, outgoing: list[Tensor], received: list[bytearray], at: int, room: int) -> None:
        tick = self._begin()
        mine = self._slot(tick & 1, self.rank, room * self.size, torch.uint8)
        for dst, data in enumerate(outgoing):
            piece = data[at : at + room]
            mine[dst * room : dst * room + piece.numel()].copy_(piece)
        self._publish(tick)
        self._await(tick)
        for src, target in enumerate(received):
            count = min(room, len(target) - at)
            if count > 0:
                slot = self._slot(tick & 1, src, room * self.size, torch.uint8)
                begin = self.rank * room
                torch.frombuffer(target, dtype=torch.uint8)[at : at + count].copy_(slot[begin : begin + count])

    def _pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        """x as flat pieces that fit in a slot; at least one, so that empty tensors take their turn too."""
        return x.reshape(-1).split(max(1, self._slot_bytes // x.element_size()))

    def _in_pieces(self, x: Tensor, call: Callable[[Tensor], None]) -> None:
        whole = x if x.is_contiguous() else x.contiguous()
        for piece in self._pieces(whole):
            call(piece)
        if whole is not x:
            x.copy_(whole)

    # ---- point to point, and the end

    def isend(self, x: Tensor, dst: int) -> Pending:
        return self._channels.send(x, dst)

    def irecv(self, x: Tensor, src: int) -> Pending:
        return self._channels.receive(x, src)

    def is_stale(self) -> bool:
        return self._block.any_closed()

    def abort(self) -> None:
        self._words[Block.line(-1)] = self.ranks[self.rank] + 1
        self.close()

    def close(self) -> None:
        self._plans.clear()
        self._block.close()


def _from_bytes(data: bytearray, like: Tensor) -> Tensor:
    """Rows of like's dtype and trailing shape."""
    shape = like.shape[1:]
    if not data:
        return like.new_empty((0, *shape))
    return torch.frombuffer(data, dtype=like.dtype).view(-1, *shape)
