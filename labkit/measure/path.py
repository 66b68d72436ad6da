"""A step's way through the stages of a pipeline, as the request that waits for it lives it.

The rank that samples waits for most of a step, and what it waits for is the stages before it. So the way is
followed through them: a stage's own computing and its calls, then the hand-over, which is queue while the
next stage is still busy with another step and transfer from when both have come. Its instants are in order
and leave no gap, so the four kinds add up to the time from the first stage's start to the last one's end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from labkit.measure.recorder import AXIS_CODES, OP_CODES, MergedStep

COMPUTE, WAIT, TRANSFER, QUEUE = range(4)
_PP, _SEND, _RECV = AXIS_CODES["pp"], OP_CODES["send"], OP_CODES["recv"]


class Path:
    """`edges`: n + 1 instants in order; `kinds`: what each of the n intervals between them was."""

    def __init__(self, edges: NDArray[np.int64], kinds: NDArray[np.int64]) -> None:
        self.edges, self.kinds = np.maximum.accumulate(edges), kinds

    @property
    def start_ns(self) -> int:
        return int(self.edges[0])

    @property
    def end_ns(self) -> int:
        return int(self.edges[-1])

    def since(self, instant_ns: int) -> tuple[int, int, int, int]:
        """Nanoseconds of compute, wait, transfer and queue from that instant on.

        A chunk of a prompt enters the pipeline before the chunk ahead of it has left: what they share counts
        once.
        """
        spans = np.diff(np.maximum(self.edges, instant_ns))
        compute, wait, transfer, queue = np.bincount(self.kinds, spans, 4).astype(np.int64).tolist()
        return compute, wait, transfer, queue


def path_of(step: MergedStep, chain: Sequence[int]) -> Path | None:
    """Through the ranks of `chain`, stage by stage; None when a hand-over between them was not recorded."""
    edges: list[NDArray[np.int64]] = []
    kinds: list[NDArray[np.int64]] = []
    begin_ns = step.start_ns[step.ranks.index(chain[0])]
    for rank, following in zip(chain, [*chain[1:], None], strict=True):
        rows = step.rows[step.rows["rank"] == rank]
        if following is None:
            _add_stage(edges, kinds, rows, begin_ns, step.end_ns[step.ranks.index(rank)])
            break
        sent = _first(rows, _SEND)
        received = _first(step.rows[step.rows["rank"] == following], _RECV)
        if sent is None or received is None:
            return None
        _add_stage(edges, kinds, rows, begin_ns, int(sent["enter_ns"]))
        edges.append(np.array([max(sent["enter_ns"], received["enter_ns"])], np.int64))
        kinds.append(np.array([QUEUE, TRANSFER]))
        begin_ns = int(received["exit_ns"])
    return Path(np.concatenate(edges), np.concatenate(kinds))


def _first(rows: NDArray[np.void], op: int) -> np.void | None:
    found = np.flatnonzero((rows["op"] == op) & (rows["axis"] == _PP) & (rows["bytes"] > 0))
    return rows[found[0]] if len(found) else None


def _add_stage(
    edges: list[NDArray[np.int64]],
    kinds: list[NDArray[np.int64]],
    rows: NDArray[np.void],
    begin_ns: int,
    end_ns: int,
) -> None:
    """A stage's time between receiving and sending on: calls are wait, then transfer; compute lies between."""
    calls = rows[(rows["axis"] != _PP) & (rows["exit_ns"] > begin_ns) & (rows["exit_ns"] <= end_ns)]
    met = calls["enter_ns"] + calls["wait_ns"]
    inner = np.stack([calls["enter_ns"], met, calls["exit_ns"]], axis=1).ravel()
    edges.append(np.concatenate([[begin_ns], inner, [end_ns]]).astype(np.int64))
    kinds.append(np.append(np.tile([COMPUTE, WAIT, TRANSFER], len(calls)), COMPUTE))
