"""The one door for traffic between ranks: parallel code holds a `Group`, and every crossing goes through it.

A group knows its rank, size and axis, and speaks over a `Wire` that some fabric made (shared memory, gloo,
NCCL). Around each call the door notes axis, operation, layer, phase, bytes and the two instants in a ring
of its own. Wait and transfer are told apart later, from the rows of all ranks; here nothing is measured
twice. A group of one rank is free: its calls return at once and leave no row. Every method must be called
by all ranks of the group, in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from labkit.measure.recorder import AXIS_CODES, MIXED, OP_CODES, group_id
from labkit.parallel.ring import EventRing, Ring
from labkit.parallel.wire import Fabric, PeerLost, Pending, Wire

__all__ = ["Door", "Fabric", "Group", "PeerLost", "Pending", "Wire"]

_ALL_REDUCE = OP_CODES["all_reduce"]
_ALL_GATHER = OP_CODES["all_gather"]
_REDUCE_SCATTER = OP_CODES["reduce_scatter"]
_ALL_TO_ALL = OP_CODES["all_to_all"]
_BROADCAST = OP_CODES["broadcast"]
_GATHER = OP_CODES["gather"]
_BARRIER = OP_CODES["barrier"]
_SEND = OP_CODES["send"]
_RECV = OP_CODES["recv"]
_EDGE_SHIFT, _EDGE_COUNT = 20, (1 << 20) - 1


class Drained(Protocol):
    """What gathers rows during a step, to be taken away after it."""

    num_own_tokens: int | None
    """Of the step's tokens, from the first, how many are this rank's to tell of; None: all."""

    def drain(self) -> bytes: ...


class Door:
    """What all groups of a rank share: the ring, and the tags that the decoder sets as it goes."""

    def __init__(self, ring: Ring | EventRing | None = None, recording: bool = True) -> None:
        self.ring: Ring | EventRing = ring or Ring()
        self.recording = recording
        self.layer = -1
        """Layer now computed; -1 outside the layers."""
        self.phase = MIXED
        self.delay_s = 0.0
        """A drill: this rank comes so much later to each sum over ranks of `delay_layer` (-1: of every layer)."""
        self.delay_layer = -1
        self.experts: Drained | None = None
        """Notes what the experts of this rank did (`labkit.parallel.expert`); None for dense models."""
        self.sending: list[Pending] = []
        """Sends that went on without being waited for, and that this rank must still move along by hand."""

    def advance(self) -> None:
        """Move the sends under way along, as far as they go without waiting."""
        self.sending = [pending for pending in self.sending if not pending.advance()]

    def tag(self, layer: int = -1, phase: int = MIXED) -> None:
        self.layer, self.phase = layer, phase

    def drain(self) -> bytes:
        """Rows of RING_DTYPE since the last drain. On CUDA it waits for the device: call it after the step."""
        return self.ring.drain()

    def drain_experts(self) -> bytes:
        """Rows of `labkit.measure.experts` since the last drain."""
        return b"" if self.experts is None else self.experts.drain()

    def straggle(self) -> None:
        if self.delay_layer in (-1, self.layer):
            time.sleep(self.delay_s)


class Group:
    """The ranks that share one axis, seen from one of them.

    rank: place in the group (0..size-1); ranks: the global ranks; sources and destinations are places in
    the group.
    """

    def __init__(self, rank: int, size: int, axis: str, ranks: tuple[int, ...], *, index: int = 0,
                 wire: Wire | None = None, door: Door | None = None) -> None:  # fmt: skip
        if size > 1 and wire is None:
            raise ValueError(f"a group of {size} ranks needs a wire that joins them; open it through a Mesh")
        self.rank = rank
        self.size = size
        self.axis = axis
        self.ranks = ranks
        self.door = door or Door()
        self.group_id = group_id(axis, index)
        self._axis_code = AXIS_CODES[axis]
        self._seq = 0
        self._edge_seqs: dict[int, int] = {}
        """Transfers so far on each edge: the two ends count alike, whatever else either of them does."""
        self._wire = wire

    def __repr__(self) -> str:
        return f"Group({self.axis} {self.rank}/{self.size} of ranks {self.ranks})"

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks; x is overwritten with it and returned. Every rank gets the same bits."""
        wire = self._wire
        if wire is None:
            return x
        door = self.door
        if door.delay_s:
            door.straggle()
        entered = door.ring.now()
        wire.all_reduce(x)
        self._note(_ALL_REDUCE, x.nbytes, entered)
        return x

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """The ranks' tensors (equal shapes) joined along `dim`, in rank order."""
        if self._wire is None:
            return x
        entered = self.door.ring.now()
        y = self._wire.all_gather(x, dim)
        self._note(_ALL_GATHER, x.nbytes, entered)
        return y

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's share, along `dim`, of the sum over the ranks. ValueError when dim does not divide."""
        if self._wire is None:
            return x
        if x.shape[dim] % self.size:
            raise ValueError(
                f"reduce_scatter shares out dimension {dim} of length {x.shape[dim]} over {self.size} ranks, "
                f"which does not divide; pad it to a multiple of {self.size}"
            )
        if self.door.delay_s:
            self.door.straggle()
        entered = self.door.ring.now()
        y = self._wire.reduce_scatter(x, dim)
        self._note(_REDUCE_SCATTER, x.nbytes, entered)
        return y

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Part i goes to rank i; what comes back is one tensor from each rank.

        The parts may differ in their first dimension (it may be 0); all else (dtype, other dimensions) is
        equal.
        """
        if len(parts) != self.size:
            raise ValueError(f"all_to_all over {self.size} ranks takes {self.size} parts, got {len(parts)}")
        if self._wire is None:
            return list(parts)
        entered = self.door.ring.now()
        received = self._wire.all_to_all(parts)
        self._note(_ALL_TO_ALL, sum(part.nbytes for part in parts), entered)
        return received

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """x of rank `src`, written into x on all the others."""
        if self._wire is None:
            return x
        entered = self.door.ring.now()
        self._wire.broadcast(x, src)
        self._note(_BROADCAST, x.nbytes, entered)
        return x

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """Every rank's tensor (equal shapes) on group rank 0, in rank order; None elsewhere."""
        if self._wire is None:
            return [x]
        entered = self.door.ring.now()
        gathered = self._wire.gather(x)
        self._note(_GATHER, x.nbytes, entered)
        return gathered

    def barrier(self) -> None:
        if self._wire is None:
            return
        entered = self.door.ring.now()
        self._wire.barrier()
        self._note(_BARRIER, 0, entered)

    def isend(self, x: Tensor, dst: int) -> Pending:
        """Start sending x; it must not change before `wait()` has returned.

        The row is what this call took of the rank's time; a `wait()` that comes later leaves one of 0 bytes.
        """
        wire = self._peer_wire(dst, "send to")
        seq = self._next_on_edge(self.rank, dst)
        entered = self.door.ring.now()
        pending = wire.isend(x, dst)
        self._put(seq, _SEND, x.nbytes, entered)
        return _Noted(self, pending, seq, _SEND, 0)

    def irecv(self, x: Tensor, src: int) -> Pending:
        """Start receiving into x (contiguous); it is there when `wait()` has returned.

        The row's entry is the instant at which the wait began: until then the rank had other things to do.
        """
        wire = self._peer_wire(src, "receive from")
        return _Noted(self, wire.irecv(x, src), self._next_on_edge(src, self.rank), _RECV, x.nbytes)

    def _next_on_edge(self, src: int, dst: int) -> int:
        """The number under which both ends of a transfer note it: the edge above, the count below."""
        edge = src * self.size + dst
        count = self._edge_seqs.get(edge, 0)
        self._edge_seqs[edge] = count + 1
        return edge << _EDGE_SHIFT | count & _EDGE_COUNT

    def _peer_wire(self, peer: int, what: str) -> Wire:
        if self._wire is None or not 0 <= peer < self.size or peer == self.rank:
            raise ValueError(
                f"rank {self.rank} of a group of {self.size} cannot {what} rank {peer}: name another rank of the group"
            )
        return self._wire

    def _note(self, op: int, num_bytes: int, entered: int) -> None:
        seq = self._seq
        self._seq = seq + 1
        self._put(seq, op, num_bytes, entered)

    def _put(self, seq: int, op: int, num_bytes: int, entered: int) -> None:
        door = self.door
        if door.recording:
            ring = door.ring
            ring.put(
                self.group_id,
                seq,
                op,
                self._axis_code,
                door.phase,
                door.layer,
                num_bytes,
                entered,
                ring.now(),
            )


class _Noted:
    """A pending transfer whose `wait()` leaves a row of the time it took, with the tags of its beginning."""

    def __init__(self, group: Group, pending: Pending, seq: int, op: int, num_bytes: int) -> None:
        self._group, self._pending = group, pending
        self._seq, self._op, self._num_bytes = seq, op, num_bytes
        self._tags = (group.door.layer, group.door.phase)
        self._done = False

    def advance(self) -> bool:
        return self._pending.advance()

    def wait(self) -> None:
        if self._done:
            return
        door = self._group.door
        entered = door.ring.now()
        self._pending.wait()
        self._done = True
        tags = (door.layer, door.phase)
        door.layer, door.phase = self._tags
        self._group._put(self._seq, self._op, self._num_bytes, entered)
        door.layer, door.phase = tags
