"""A rank's part in handing KV over: it gives pieces of its cache, or takes pieces into it, beside its steps.

What passes follows from the two layouts (`labkit.layout.reshard`). Pieces are gathered and written by the rank's own
thread, between two steps; only their bytes travel on a thread of this room, so that a long transfer stops no step,
and a step stops no transfer. On CUDA the bytes travel on a stream of their own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from labkit.engine.messages import Moved, MoveKV
from labkit.layout import Deployment, Share, Slots, kv_heads, layers, passing, reshard
from labkit.layout.deployment import Pool
from labkit.model.kv_cache import KVCache
from labkit.model.spec import ModelSpec
from labkit.parallel.comm import Group
from labkit.parallel.wire import Pending

_NAP_S = 100e-6
"""Between two looks at what moves by hand. Short beside a decode step; the thread holds no lock meanwhile."""


@dataclass(eq=False)
class _Move:
    message: MoveKV
    start_ns: int
    given: list[tuple[int, Tensor]] = field(default_factory=list)
    """(place in the group, bytes)"""
    taken: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    """(place in the group, where it belongs, what comes: [layers, 2, heads, tokens, head_dim])"""
    slots: list[Tensor] = field(default_factory=list)
    """Of each of `taken`: which slots its tokens have."""
    gathered: torch.cuda.Event | None = None


class KVMover:
    """Of one rank of a deployment, `rank` in the world; `group` joins all that hand KV over."""

    def __init__(self, group: Group, rank: int, deployment: Deployment, spec: ModelSpec, block_size: int,
                 cache: KVCache, device: torch.device) -> None:  # fmt: skip
        self._group, self._rank, self._deployment, self._spec = group, rank, deployment, spec
        self._block_size, self._device = block_size, device
        self._memory = cache.by_token()
        self._moves: SimpleQueue[_Move | None] = SimpleQueue()
        self._arrived: deque[_Move] = deque()
        self._num_open = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        return self._num_open > 0

    def begin(self, message: MoveKV) -> None:
        """Gather what this rank gives, make room for what it takes, and let the bytes go their way."""
        move = _Move(message, time.monotonic_ns())
        pools = self._deployment.pools
        source, target = pools[message.source[0]], pools[message.target[0]]
        for share in reshard(source.layout, target.layout, self._spec, message.source[1], message.target[1]):
            if self._rank in (source.first_rank + share.source, target.first_rank + share.target):
                self._add(move, share, source, target)
        if self._device.type == "cuda":
            move.gathered = torch.cuda.Event()
            move.gathered.record()
        self._num_open += 1
        self._moves.put(move)
        if self._thread is None:
            self._thread = threading.Thread(target=self._carry_all, name="labkit-handoff", daemon=True)
            self._thread.start()

    def landed(self) -> list[Moved]:
        """Write what has come into the cache; an answer for each move that is over. Raises what the thread met."""
        answers = []
        while self._arrived:
            move = self._arrived.popleft()
            for (_, place, piece), slots in zip(move.taken, move.slots, strict=True):
                place.index_copy_(3, slots, piece)
            if self._device.type == "cuda" and move.taken:
                torch.cuda.current_stream().synchronize()
            self._num_open -= 1
            sent = sum(piece.nbytes for _, piece in move.given)
            message = move.message
            now_ns = time.monotonic_ns()
            answers.append(Moved(message.epoch, message.move_id, self._rank, sent, move.start_ns, now_ns))
        if self._error is not None:
            raise self._error
        return answers

    def close(self) -> None:
        """No move is open any more: the thread ends."""
        if self._thread is not None:
            self._moves.put(None)
            self._thread.join(timeout=5)
            self._thread = None

    # ---- the rank's own thread

    def _add(self, move: _Move, share: Share, source: Pool, target: Pool) -> None:
        gives = self._rank == source.first_rank + share.source
        message = move.message
        slots_of = Slots.of(source.layout, self._block_size), Slots.of(target.layout, self._block_size)
        positions = passing(share, slots_of[0], slots_of[1], message.start, message.stop)
        if not len(positions):
            return
        pool, blocks, how = (
            (source, message.source_blocks, slots_of[0]) if gives else (target, message.target_blocks, slots_of[1])
        )
        table = np.frombuffer(blocks, np.int32).astype(np.int64)
        slots = torch.from_numpy(how.slots(positions, table)).to(self._device)
        place = self._place(pool, share)
        if gives:
            peer = self._group.ranks.index(target.first_rank + share.target)
            move.given.append((peer, place.index_select(3, slots)))
            return
        peer = self._group.ranks.index(source.first_rank + share.source)
        shape = (*place.shape[:3], len(positions), place.shape[4])
        move.taken.append((peer, place, place.new_empty(shape)))
        move.slots.append(slots)

    def _place(self, pool: Pool, share: Share) -> Tensor:
        """The share's layers and heads in this rank's cache: [layers, 2, heads, slots, head_dim]."""
        local = self._rank - pool.first_rank
        first_layer = layers(pool.layout, self._spec, local).start
        first_head = kv_heads(pool.layout, self._spec, local).start
        in_layers = slice(share.layers.start - first_layer, share.layers.stop - first_layer)
        in_heads = slice(share.heads.start - first_head, share.heads.stop - first_head)
        return self._memory[in_layers, :, in_heads]

    # ---- the thread of the bytes

    def _carry_all(self) -> None:
        try:
            with torch.inference_mode(), _own_stream(self._device) as stream:
                while (move := self._moves.get()) is not None:
                    if stream is not None and move.gathered is not None:
                        stream.wait_event(move.gathered)
                    self._carry(move)
                    _drain(stream)
                    self._arrived.append(move)
        except BaseException as error:  # told by the rank's own thread, as its last words
            self._error = error

    def _carry(self, move: _Move) -> None:
        """All of a move's receives and sends at once: every rank takes the moves in one order, so none waits."""
        under_way: list[Pending] = [self._group.irecv(_bytes(piece), peer) for peer, _, piece in move.taken]
        under_way += [self._group.isend(_bytes(piece), peer) for peer, piece in move.given]
        left = under_way
        while left := [pending for pending in left if not pending.advance()]:
            time.sleep(_NAP_S)
        for pending in under_way:
            pending.wait()


def _bytes(piece: Tensor) -> Tensor:
    return piece.view(-1).view(torch.uint8)


@contextlib.contextmanager
def _own_stream(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    if device.type != "cuda":
        yield None
        return
    torch.cuda.set_device(device)  # a thread's current device is its own
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield stream


def _drain(stream: torch.cuda.Stream | None) -> None:
    """Until the device has carried everything, without a spin that would hold the interpreter."""
    if stream is None:
        return
    event = torch.cuda.Event()
    event.record(stream)
    while not event.query():
        time.sleep(_NAP_S)
