"""What crosses between ranks, by axis, operation and phase: how often one rank hands something over, and how much.

The engine adds up a tenth of a second's rows (`tally`), a page the last seconds of those (`CrossingMeter`). Counted
is what a rank hands over: a collective once on each of its ranks, a message on the rank that sends it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from labkit.measure.recorder import AXES, OP_CODES, OPS, PHASES

_NOT_HANDED_OVER = (OP_CODES["recv"], OP_CODES["barrier"])


class Crossings(msgspec.Struct, gc=False):
    """Of one axis, operation and phase, in some stretch of time."""

    axis: str
    op: str
    phase: str
    num: int
    """Handed over, all ranks together."""
    bytes: int
    ranks: list[int]
    """Who handed over."""


def tally(rows: NDArray[np.void]) -> list[Crossings]:
    """rows: MERGED_DTYPE. A row of no bytes (a later wait for a send, a barrier) hands over nothing."""
    mine = rows[(rows["bytes"] > 0) & ~np.isin(rows["op"], _NOT_HANDED_OVER)]
    if not len(mine):
        return []
    keys = (mine["axis"].astype(np.int32) * len(OPS) + mine["op"]) * len(PHASES) + mine["phase"]
    kinds, kind_of, counts = np.unique(keys, return_inverse=True, return_counts=True)
    sums = np.bincount(kind_of, mine["bytes"])
    found = []
    for i, key in enumerate(kinds.tolist()):
        rest, phase = divmod(key, len(PHASES))
        axis, op = divmod(rest, len(OPS))
        ranks = np.unique(mine["rank"][kind_of == i]).tolist()
        found.append(Crossings(AXES[axis], OPS[op], PHASES[phase], int(counts[i]), int(sums[i]), ranks))
    return found


class CrossingMeter:
    """The last `seconds`, in buckets of a tenth of a second."""

    _BUCKET_NS = 100_000_000

    def __init__(self, seconds: float = 5.0) -> None:
        self.seconds = seconds
        self._buckets: dict[int, list[Crossings]] = defaultdict(list)
        self._since_ns = 0

    def reset(self, now_ns: int) -> None:
        """Another layout: what crossed under the one before is not its."""
        self._buckets.clear()
        self._since_ns = now_ns

    def add(self, crossings: Iterable[Crossings], at_ns: int, begun_ns: int) -> None:
        """begun_ns: when the first of their steps began; those of the layout before are told a moment after its end."""
        if begun_ns >= self._since_ns:
            self._buckets[at_ns // self._BUCKET_NS].extend(crossings)

    def snapshot(self, now_ns: int) -> list[dict[str, Any]]:
        """By axis and phase: `per_s` (of one rank), `bytes` (mean of one), and the same of each operation in `ops`."""
        oldest = (now_ns - round(self.seconds * 1e9)) // self._BUCKET_NS + 1
        for old in [bucket for bucket in self._buckets if bucket < oldest]:
            del self._buckets[old]
        span_s = max(1, now_ns - max(self._since_ns, oldest * self._BUCKET_NS)) / 1e9
        kinds: dict[tuple[str, str], dict[str, list[Crossings]]] = defaultdict(lambda: defaultdict(list))
        for bucket in self._buckets.values():
            for crossing in bucket:
                kinds[crossing.axis, crossing.phase][crossing.op].append(crossing)
        ordered = sorted(kinds.items(), key=_place)
        return [{"axis": axis, "phase": phase, **_whole(ops, span_s)} for (axis, phase), ops in ordered]


def _place(entry: tuple[tuple[str, str], Any]) -> tuple[int, int]:
    (axis, phase), _ = entry
    return AXES.index(axis), PHASES.index(phase)


def _whole(ops: dict[str, list[Crossings]], span_s: float) -> dict[str, Any]:
    together = _rate([crossing for each in ops.values() for crossing in each], span_s)
    return together | {"ops": [{"op": op, **_rate(each, span_s)} for op, each in ops.items()]}


def _rate(crossings: list[Crossings], span_s: float) -> dict[str, float]:
    num = sum(crossing.num for crossing in crossings)
    ranks = {rank for crossing in crossings for rank in crossing.ranks}
    return {"per_s": num / len(ranks) / span_s, "bytes": sum(crossing.bytes for crossing in crossings) / num}
