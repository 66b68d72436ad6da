"""What a rank's experts did in a step: one row of integers for each MoE layer.

Tokens of each expert are counted where they were routed (so that sums over ranks count each once), rows and
time where they were computed, bytes where they left. Summed over a step's ranks they say which experts are
popular, which rank is the busiest, and what went between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.measure.recorder import AXIS_CODES, OP_CODES
from labkit.measure.records import StepRecord

LAYER, ROWS, SENT_BYTES, DROPPED, TIME_NS = range(5)
NUM_FIELDS = 5
"""Then follow the tokens of each expert, as this rank routed them."""

Ints = NDArray[np.int64]


def pack_rows(rows: Sequence[Sequence[int]]) -> bytes:
    return np.asarray(rows, dtype="<i8").tobytes() if rows else b""


def unpack_rows(data: bytes, num_experts: int) -> Ints:
    """int64 [MoE layers, NUM_FIELDS + experts]."""
    return np.frombuffer(data, dtype="<i8").reshape(-1, NUM_FIELDS + num_experts)


@dataclass(frozen=True)
class ExpertStep:
    """One step over the ranks that it carried; the lists are in the order of the ranks."""

    tokens: dict[int, Ints]
    """Layer → tokens of each expert, drops included."""
    rows: list[int]
    """Rows computed, all layers together: what makes a rank busy."""
    sent_bytes: list[int]
    """To other ranks, there and back."""
    time_ns: list[int]
    num_dropped: int

    @property
    def tokens_by_expert(self) -> list[int]:
        """All layers together."""
        return np.sum(list(self.tokens.values()), axis=0).tolist() if self.tokens else []


def merge_experts(pieces: Mapping[int, bytes], ranks: Sequence[int], num_experts: int) -> ExpertStep | None:
    """The ranks' rows of one step as one; None when no rank wrote any (a dense model, or nothing recorded)."""
    mine = [unpack_rows(pieces.get(rank, b""), num_experts) for rank in ranks]
    if not any(len(rows) for rows in mine):
        return None
    tokens: dict[int, Ints] = {}
    for row in np.concatenate(mine):
        layer = int(row[LAYER])
        tokens[layer] = tokens.get(layer, 0) + row[NUM_FIELDS:]
    return ExpertStep(
        tokens=tokens,
        rows=[int(rows[:, ROWS].sum()) for rows in mine],
        sent_bytes=[int(rows[:, SENT_BYTES].sum()) for rows in mine],
        time_ns=[int(rows[:, TIME_NS].sum()) for rows in mine],
        num_dropped=int(sum(rows[:, DROPPED].sum() for rows in mine)),
    )


def waits_for_busiest(rows: NDArray[np.void], ranks: Sequence[int]) -> list[int]:
    """Nanoseconds that each rank waited to get its tokens back: in a combine all wait for who computes longest.

    rows: MERGED_DTYPE of a step. A layer's exchanges alternate, dispatch and combine; the first kind's waits
    have to do with attention, so only the second kind's count.
    """
    mine = rows[(rows["axis"] == AXIS_CODES["ep"]) & (rows["op"] == OP_CODES["all_to_all"])]
    return [int(mine["wait_ns"][mine["rank"] == rank][1::2].sum()) for rank in ranks]


class ExpertMeter:
    """What the experts were asked in the last `seconds`, in buckets of a tenth of a second."""

    _BUCKET_NS = 100_000_000

    def __init__(self, seconds: float = 5.0) -> None:
        self.seconds = seconds
        self._tokens: dict[int, Ints] = {}
        self._dropped: dict[int, int] = {}
        self._ranks: dict[int, dict[int, Ints]] = {}
        self._since_ns = 0

    def reset(self, now_ns: int) -> None:
        """Another layout: steps that began before now are not its."""
        for buckets in (self._tokens, self._dropped, self._ranks):
            buckets.clear()
        self._since_ns = now_ns

    def add(self, steps: Iterable[StepRecord]) -> None:
        for step in steps:
            if step.expert_tokens and step.start_ns >= self._since_ns:
                self._add(step, step.end_ns // self._BUCKET_NS)

    def _add(self, step: StepRecord, bucket: int) -> None:
        self._tokens[bucket] = self._tokens.get(bucket, 0) + np.array(step.expert_tokens, np.int64)
        self._dropped[bucket] = self._dropped.get(bucket, 0) + step.num_dropped
        ranks = self._ranks.setdefault(bucket, {})
        columns = (step.expert_rows, step.expert_sent_bytes, step.expert_ns, step.expert_wait_ns)
        for rank, figures in zip(step.ranks, zip(*columns, strict=True), strict=True):
            ranks[rank] = ranks.get(rank, 0) + np.array(figures, np.int64)

    def snapshot(self, now_ns: int) -> dict[str, Any] | None:
        """`tokens` by expert (all MoE layers), `ranks` [{rank, rows, sent_bytes, compute_ms, wait_ms}], `num_dropped`.

        Sums over the steps of the last seconds; None where no step had experts.
        """
        oldest = (now_ns - round(self.seconds * 1e9)) // self._BUCKET_NS + 1
        for old in [bucket for bucket in self._tokens if bucket < oldest]:
            del self._tokens[old], self._dropped[old], self._ranks[old]
        if not self._tokens:
            return None
        sums: dict[int, Ints] = {}
        for ranks in self._ranks.values():
            for rank, figures in ranks.items():
                sums[rank] = sums.get(rank, 0) + figures
        return {
            "tokens": np.sum(list(self._tokens.values()), axis=0).tolist(),
            "ranks": [_rank_figures(rank, sums[rank].tolist()) for rank in sorted(sums)],
            "num_dropped": sum(self._dropped.values()),
        }


def _rank_figures(rank: int, sums: Sequence[int]) -> dict[str, float]:
    rows, sent_bytes, compute_ns, wait_ns = sums
    milliseconds = {"compute_ms": compute_ns / 1e6, "wait_ms": wait_ns / 1e6}
    return {"rank": rank, "rows": rows, "sent_bytes": sent_bytes, **milliseconds}
