"""The profiler's NCCL kernels held against the rows of the door, one for one.

Two observers that know nothing of each other saw the same collectives: the door noted what was asked for, the profiler
what ran on the device. Kernels of one operation run in the order in which they were asked for, so they are paired in
that order and their sizes compared where the profiler tells them (its metadata of NCCL kernels: "In msg nelems" and
"dtype"). What is left over on either side, or differs in size, is told: then one of the two is wrong. A captured graph
replays its collectives without passing the door, so kernels that a graph launched are counted apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from labkit.measure.kernel_classes import ITEM_BYTES, is_nccl

FAMILIES = {
    "all_reduce": ("AllReduce", 1), "barrier": ("AllReduce", 1), "all_gather": ("AllGather", 1),
    "gather": ("AllGather", 1), "reduce_scatter": ("ReduceScatter", 1), "broadcast": ("Broadcast", 1),
    "all_to_all": ("SendRecv", 2), "send": ("SendRecv", 1), "recv": ("SendRecv", 1),
}  # fmt: skip
"""The door's operation → the word in its kernels' names, and how many it launches over NCCL (`labkit.parallel`): there
a gather is an all-gather, a barrier a sum of one element, and an all-to-all swaps its counts first."""
_TOLD_BYTES = ("all_reduce", "all_gather", "gather", "reduce_scatter", "broadcast")
_MOST_SENTENCES = 5
Event = Mapping[str, Any]


@dataclass
class NcclMatch:
    """What two observers agree on; `differences`: sentences, the first few of `num_differing`."""

    num_matched: int = 0
    num_same_bytes: int = 0
    """Of the matched ones, those whose size both told, and alike."""
    num_in_graphs: int = 0
    num_differing: int = 0
    differences: list[str] = field(default_factory=list)

    def differ(self, sentence: str) -> None:
        self.num_differing += 1
        if len(self.differences) < _MOST_SENTENCES:
            self.differences.append(sentence)

    @property
    def sentence(self) -> str:
        if not self.num_differing:
            graphs = f", {self.num_in_graphs} more ran in graphs" if self.num_in_graphs else ""
            return f"{self.num_matched} NCCL kernels are the door's collectives, one for one{graphs}."
        told = " ".join(self.differences)
        return f"NCCL kernels and the door's collectives differ {self.num_differing} times: {told}"


def match_nccl(
    kernels: Sequence[Event], rows: Sequence[Event], graph_launches: frozenset[Any] = frozenset()
) -> NcclMatch:
    """kernels: NCCL's, as trace events; rows: the door's tags (`args`: op, bytes). graph_launches: correlations of
    the calls that launched graphs.
    """
    found = NcclMatch()
    ran: dict[str, list[Event]] = {}
    for kernel in sorted(kernels, key=lambda event: event["ts"]):
        if (kernel.get("args") or {}).get("correlation") in graph_launches:
            found.num_in_graphs += 1
        else:
            ran.setdefault(family_of(kernel["name"]), []).append(kernel)
    asked: dict[str, list[Event]] = {}
    for row in sorted(rows, key=lambda event: event["ts"]):
        if row["args"]["op"] == "send" and not row["args"]["bytes"]:
            continue  # a later wait for a send that has its row
        family, count = FAMILIES[row["args"]["op"]]
        asked.setdefault(family, []).extend([row] * count)
    for family in sorted(ran.keys() | asked.keys()):
        _pair(found, family, ran.get(family, []), asked.get(family, []))
    return found


def family_of(name: str) -> str:
    """AllReduce of ncclDevKernel_AllReduce_Sum_bf16_RING_LL; the name itself where it is of no known family."""
    families = {word for word, _ in FAMILIES.values()}
    return next((word for word in families if is_nccl(name) and f"_{word}" in name), name)


def _pair(found: NcclMatch, family: str, ran: Sequence[Event], asked: Sequence[Event]) -> None:
    if len(ran) != len(asked):
        found.differ(f"{len(ran)} kernels of {family} ran, and the door has {len(asked)}.")
    for at, (kernel, row) in enumerate(zip_longest(ran, asked)):
        if kernel is None or row is None:
            break
        told, noted = kernel_bytes(kernel), int(row["args"]["bytes"])
        if told is None or row["args"]["op"] not in _TOLD_BYTES:
            found.num_matched += 1
        elif told == noted:
            found.num_matched += 1
            found.num_same_bytes += 1
        else:
            found.differ(f"{family} {at + 1} moved {told} bytes, and the door noted {noted}.")


def kernel_bytes(kernel: Event) -> int | None:
    """Of the buffer that this rank gave; None where the profiler does not tell."""
    told = kernel.get("args") or {}
    count, item = told.get("In msg nelems"), ITEM_BYTES.get(str(told.get("dtype", "")).lower())
    return None if count is None or item is None else int(count) * item
