"""What a run's experts did, added up over its steps: who was asked, who computed, who sent, who waited.

Sums, because a share of a sum is exact on any machine: rows and bytes depend on the routing alone. Time and waits
are the machine's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from labkit.measure.records import StepRecord


@dataclass(frozen=True)
class ExpertTotals:
    """Over the steps of a run. `by rank` means rank → sum."""

    tokens: list[int]
    """By expert: how often a token chose it, all layers together, drops included."""
    rows: dict[int, int]
    """By rank: rows that its experts computed, padding included."""
    sent_bytes: dict[int, int]
    """By rank: to other ranks, tokens there and outputs back."""
    time_ns: dict[int, int]
    """By rank: inside its experts' products."""
    wait_ns: dict[int, int]
    """By rank: in combines, for the rank that computes longest."""
    num_dropped: int
    num_tokens: int
    """Prompt tokens computed and tokens decoded."""
    num_steps: int

    @property
    def busiest_expert(self) -> int:
        return max(range(len(self.tokens)), key=self.tokens.__getitem__)

    @property
    def busiest_rank(self) -> int:
        return max(self.rows, key=self.rows.__getitem__)

    @property
    def unevenness(self) -> float:
        """The busiest rank's rows over the mean rank's: 1 is even."""
        total = sum(self.rows.values())
        return self.rows[self.busiest_rank] * len(self.rows) / total if total else 1.0

    @property
    def dropped_share(self) -> float:
        """Of all choices, how many were dropped."""
        asked = sum(self.tokens)
        return self.num_dropped / asked if asked else 0.0

    @property
    def sent_bytes_per_token(self) -> float:
        """All ranks together."""
        return sum(self.sent_bytes.values()) / max(1, self.num_tokens)


def expert_totals(steps: Iterable[StepRecord]) -> ExpertTotals:
    """Raises ValueError when no step tells of experts: a dense model, or a run without a recorder."""
    told = [step for step in steps if step.expert_tokens]
    if not told:
        raise ValueError("No step of this run tells of experts: its model has none, or it ran with record=False.")
    return ExpertTotals(
        tokens=[sum(column) for column in zip(*(step.expert_tokens for step in told), strict=True)],
        rows=_by_rank((step.ranks, step.expert_rows) for step in told),
        sent_bytes=_by_rank((step.ranks, step.expert_sent_bytes) for step in told),
        time_ns=_by_rank((step.ranks, step.expert_ns) for step in told),
        wait_ns=_by_rank((step.ranks, step.expert_wait_ns) for step in told),
        num_dropped=sum(step.num_dropped for step in told),
        num_tokens=sum(step.prefill_tokens + step.num_decode_seqs for step in told),
        num_steps=len(told),
    )


def _by_rank(pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> dict[int, int]:
    total: Counter[int] = Counter()
    for ranks, values in pairs:
        for rank, value in zip(ranks, values, strict=True):
            total[rank] += value
    return {rank: total[rank] for rank in sorted(total)}
