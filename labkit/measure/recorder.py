"""Each rank writes one fixed-size row per collective; a step's rows are split afterwards into wait and
transfer.

A rank alone cannot tell a slow link from a late neighbour: both look like a long call. Rows of different
ranks are therefore matched by (group_id, seq) and compared. Where the ranks share a clock, a rank waits
until the last one has entered, and what follows is transfer. Where they do not (several hosts, CUDA
events), the shortest call of a match is the transfer, and what the others took beyond it is wait. A transfer
from one rank to one other begins when both have come: until then the receiver waits, and a pipeline's stage is
idle, which is its bubble and not wait. Compute is the time between calls, from its own instants.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

OPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "gather",
    "barrier",
    "send",
    "recv",
)
AXES = ("tp", "pcp", "pp", "dp", "dcp", "ep", "world", "handoff")
PHASES = ("prefill", "decode", "mixed")

OP_CODES = {name: code for code, name in enumerate(OPS)}
AXIS_CODES = {name: code for code, name in enumerate(AXES)}
PHASE_CODES = {name: code for code, name in enumerate(PHASES)}
PREFILL, DECODE, MIXED = range(3)
_SEND, _RECV = OP_CODES["send"], OP_CODES["recv"]

_RING_FIELDS = [
    ("group_id", "<u4"),  # group_id(axis, index of the group in layout.groups(axis))
    ("seq", "<u4"),  # counts the group's collectives on this rank; of a send or receive, its edge's transfers
    ("op", "u1"),
    ("axis", "u1"),
    ("phase", "u1"),
    ("layer", "<i2"),  # -1: outside the layers (embedding, head)
    ("bytes", "<i8"),  # of the buffer that each rank gives
    ("enter_ns", "<i8"),
    ("exit_ns", "<i8"),
]
RING_DTYPE = np.dtype(_RING_FIELDS, align=True)
ROW_FORMAT = struct.Struct("<IIBBBxhxxqqq")
"""The same row for `struct`: five times faster to write than a numpy assignment."""

MERGED_DTYPE = np.dtype(
    [("epoch", "<i4"), ("step_id", "<i8"), ("rank", "<i4"), *_RING_FIELDS]
    + [("last_enter_ns", "<i8"), ("wait_ns", "<i8"), ("transfer_ns", "<i8")]
)
"""wait_ns of a receive is the time before the sender had come, a stage's bubble included."""

Piece = tuple[int, int, int, bytes]
"""One rank's share of a step: (rank, start_ns, end_ns, rows of its ring)."""


def phase_code(num_chunks: int, num_decodes: int) -> int:
    """The phase of a step that carries so many chunks of prompts and so many decodes."""
    if not num_chunks:
        return DECODE
    return MIXED if num_decodes else PREFILL


def group_id(axis: str, index: int) -> int:
    """The id under which rows of one group are matched.

    The axis and the group's place in `layout.groups(axis)`.
    """
    return AXIS_CODES[axis] << 16 | index


class Ring:
    """A rank's preallocated rows. `put` costs under a microsecond; `drain` hands out what came since the
    last one.

    When more rows come than fit, the oldest are overwritten and counted in `num_dropped`.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._buffer = bytearray(capacity * ROW_FORMAT.size)
        self._pack = ROW_FORMAT.pack_into
        self._count = 0
        self.num_dropped = 0

    def put(
        self,
        group: int,
        seq: int,
        op: int,
        axis: int,
        phase: int,
        layer: int,
        num_bytes: int,
        enter_ns: int,
        exit_ns: int,
    ) -> None:
        at = self._count % self._capacity * ROW_FORMAT.size
        seq &= 0xFFFFFFFF
        self._pack(self._buffer, at, group, seq, op, axis, phase, layer, num_bytes, enter_ns, exit_ns)
        self._count += 1

    def drain(self) -> bytes:
        """The rows since the last drain, oldest first."""
        size, count = ROW_FORMAT.size, self._count
        self._count = 0
        if count <= self._capacity:
            return bytes(self._buffer[: count * size])
        self.num_dropped += count - self._capacity
        cut = count % self._capacity * size
        return bytes(self._buffer[cut:] + self._buffer[:cut])


@dataclass(slots=True)
class MergedStep:
    """A step over its ranks.

    The lists are in the order of `ranks`; per rank and step all instants are own ones.
    """

    ranks: list[int]
    start_ns: list[int]
    end_ns: list[int]
    compute_ns: list[int]
    wait_ns: list[int]
    transfer_ns: list[int]
    idle_ns: list[int]
    """In receives from the stage before, until it had sent: the bubble. A wait inside a ring is a wait."""
    num_collectives: int
    """Collectives of the step, each counted once, not once a rank."""
    collective_bytes: int
    """Their buffers' bytes, each counted once."""
    rows: NDArray[np.void]
    """MERGED_DTYPE, rank after rank."""


def merge(
    pieces: Sequence[Piece], *, shared_clock: bool = True, epoch: int = 0, step_id: int = 0
) -> MergedStep:
    """Match the rows of a step's ranks and split each call into wait and transfer (their sum is the call).

    shared_clock: True for CPU ranks of one host (CLOCK_MONOTONIC is common); False across hosts and for
    CUDA events. A call that only one rank recorded has no wait.
    """
    rows, rank_index = _stack(pieces, epoch, step_id)
    first_of_match, match = _match(rows)
    _split(rows, match, shared_clock)
    num_ranks = len(pieces)
    bubbles = (rows["op"] == _RECV) & (rows["axis"] == AXIS_CODES["pp"])
    wait = np.bincount(rank_index, rows["wait_ns"] * ~bubbles, num_ranks)
    idle = np.bincount(rank_index, rows["wait_ns"] * bubbles, num_ranks)
    transfer = np.bincount(rank_index, rows["transfer_ns"], num_ranks)
    return MergedStep(
        ranks=[piece[0] for piece in pieces],
        start_ns=[piece[1] for piece in pieces],
        end_ns=[piece[2] for piece in pieces],
        compute_ns=_compute(pieces, rows),
        wait_ns=wait.astype(np.int64).tolist(),
        transfer_ns=transfer.astype(np.int64).tolist(),
        idle_ns=idle.astype(np.int64).tolist(),
        num_collectives=len(first_of_match),
        collective_bytes=int(rows["bytes"][first_of_match].sum()),
        rows=rows,
    )


def merge_together(
    groups: Sequence[Sequence[Piece]], *, shared_clock: bool = True, epoch: int = 0, step_ids: Sequence[int]
) -> list[MergedStep]:
    """Steps of several replicas that meet in common collectives: matched over all ranks, then told apart again.

    A collective that two of them took part in counts in both.
    """
    whole = merge([piece for pieces in groups for piece in pieces], shared_clock=shared_clock, epoch=epoch)
    return [
        _part(whole, [piece[0] for piece in pieces], step_id)
        for pieces, step_id in zip(groups, step_ids, strict=True)
    ]


def _part(step: MergedStep, ranks: list[int], step_id: int) -> MergedStep:
    """The share of some of a step's ranks."""
    at = [step.ranks.index(rank) for rank in ranks]
    rows = step.rows[np.isin(step.rows["rank"], ranks)]
    rows["step_id"] = step_id
    first_of_match, _ = _match(rows)
    start_ns, end_ns, compute_ns, wait_ns, transfer_ns, idle_ns = (
        [values[i] for i in at]
        for values in (
            step.start_ns, step.end_ns, step.compute_ns, step.wait_ns, step.transfer_ns, step.idle_ns
        )
    )
    return MergedStep(
        ranks, start_ns, end_ns, compute_ns, wait_ns, transfer_ns, idle_ns,
        num_collectives=len(first_of_match),
        collective_bytes=int(rows["bytes"][first_of_match].sum()),
        rows=rows,
    )  # fmt: skip


def _stack(pieces: Sequence[Piece], epoch: int, step_id: int) -> tuple[NDArray[np.void], NDArray[np.intp]]:
    raw = np.frombuffer(b"".join([piece[3] for piece in pieces]), RING_DTYPE)
    counts = [len(piece[3]) // RING_DTYPE.itemsize for piece in pieces]
    rank_index = np.repeat(np.arange(len(pieces)), counts)
    rows = np.zeros(len(raw), MERGED_DTYPE)
    for name in RING_DTYPE.names or ():
        rows[name] = raw[name]
    rows["epoch"], rows["step_id"] = epoch, step_id
    rows["rank"] = np.array([piece[0] for piece in pieces], np.int32)[rank_index]
    return rows, rank_index


def _match(rows: NDArray[np.void]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Indices of the first row of every match, and for each row the number of its match."""
    keys = rows["group_id"].astype(np.uint64) << np.uint64(32) | rows["seq"]
    keys |= (rows["op"] >= _SEND).astype(np.uint64) << np.uint64(63)  # edges count apart from collectives
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    is_first = np.ones(len(keys), bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    match = np.empty(len(keys), np.intp)
    match[order] = np.cumsum(is_first) - 1
    return order[is_first], match


def _split(rows: NDArray[np.void], match: NDArray[np.intp], shared_clock: bool) -> None:
    if not len(rows):
        return
    enter, duration = rows["enter_ns"], rows["exit_ns"] - rows["enter_ns"]
    num_matches = int(match.max()) + 1
    last_enter = np.full(num_matches, np.iinfo(np.int64).min)
    # A send is entered once: the row of 0 bytes that a later wait for it leaves is no second entry.
    enters = (rows["op"] != _SEND) | (rows["bytes"] > 0)
    np.maximum.at(last_enter, match[enters], enter[enters])
    rows["last_enter_ns"] = last_enter[match]
    if shared_clock:
        wait = np.clip(rows["last_enter_ns"] - enter, 0, duration)
    else:
        shortest = np.full(num_matches, np.iinfo(np.int64).max)
        np.minimum.at(shortest, match, duration)
        wait = duration - shortest[match]
    rows["wait_ns"] = wait
    rows["transfer_ns"] = duration - wait


def _compute(pieces: Sequence[Piece], rows: NDArray[np.void]) -> list[int]:
    """Per rank: the step's start to its first call, between calls, and from the last call to the step's
    end.
    """
    sums, at = [], 0
    for _, start_ns, end_ns, ring in pieces:
        mine = rows[at : at + len(ring) // RING_DTYPE.itemsize]
        at += len(mine)
        begins = np.append(start_ns, mine["exit_ns"])
        ends = np.append(mine["enter_ns"], end_ns)
        sums.append(int(np.maximum(ends - begins, 0).sum()))
    return sums
