"""What crossed between ranks, by axis and phase: how often, how many bytes each time, for how many tokens.

A crossing is one operation of one group, counted once and not once a rank; a message from one rank to one other counts
where it was sent. Its bytes are what a rank gives to it, on average over the ranks that took part. So times × bytes is
what one rank of a group hands over, and the same bytes as few large crossings or as many small ones can be told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.measure.breakdown import phase_of
from labkit.measure.recorder import AXES, PHASES
from labkit.measure.records import StepRecord

if TYPE_CHECKING:
    import pandas as pd

PER = ("token", "second")


@dataclass(frozen=True)
class Crossings:
    """Of one axis in one phase of a run. `num_tokens` and `seconds` are those of the phase, whatever the axis."""

    axis: str
    phase: str
    num: int
    num_bytes: float
    """Over all crossings, of one rank of each."""
    num_tokens: int
    """Prompt tokens computed and tokens decoded by the phase's steps."""
    seconds: float
    """In which a step of the phase was under way."""
    per_step: float
    """How many a step of the phase takes part in; one that joins steps of several replicas counts in each."""
    op: str = ""
    """Empty: all operations of the axis together."""

    @property
    def bytes_each(self) -> float:
        return self.num_bytes / self.num

    def num_per(self, per: str) -> float:
        """Crossings per token or per second. Raises ValueError for another unit."""
        if per not in PER:
            raise ValueError(f"Crossings are counted per {' or per '.join(PER)}, not per {per!r}.")
        return self.num / (self.num_tokens if per == "token" else self.seconds)


def crossings(rows: pd.DataFrame, steps: Sequence[StepRecord], by_op: bool = False) -> list[Crossings]:
    """By axis and phase (and operation), in printed order. `rows`: one per collective and rank, as
    `Run.collectives` has them.
    """
    of_phase = {phase: [step for step in steps if phase_of(step) == phase] for phase in PHASES}
    keys = ["axis", "phase", "op"] if by_op else ["axis", "phase"]
    found = [(*key, "")[:3] + (part,) for key, part in _real(rows).groupby(keys, observed=True)] if len(rows) else []
    return [
        _summed(axis, phase, op, part, of_phase[phase])
        for in_order in AXES
        for phase_in_order in PHASES
        for axis, phase, op, part in found
        if (axis, phase) == (in_order, phase_in_order) and of_phase[phase]
    ]


def _real(rows: pd.DataFrame) -> pd.DataFrame:
    """Without the receiving ends, the waits for a send (0 bytes) and barriers, which carry nothing."""
    waits = (rows["op"] == "send") & (rows["bytes"] == 0)
    return rows[~waits & ~rows["op"].isin(["recv", "barrier"])]


def _summed(axis: str, phase: str, op: str, rows: pd.DataFrame, steps: Sequence[StepRecord]) -> Crossings:
    sends = rows[rows["op"] == "send"]
    shared = rows[rows["op"] != "send"].groupby(["epoch", "group_id", "seq"], observed=True)
    sizes, in_steps = shared["bytes"].mean(), shared["step_id"].nunique()
    return Crossings(
        axis,
        phase,
        num=len(sends) + len(sizes),
        num_bytes=float(sends["bytes"].sum() + sizes.sum()),
        num_tokens=sum(step.prefill_tokens + step.num_decode_seqs for step in steps),
        seconds=_under_way_s((step.start_ns, step.end_ns) for step in steps),
        per_step=float(len(sends) + in_steps.sum()) / len(steps),
        op=op,
    )


def _under_way_s(spans: Iterable[tuple[int, int]]) -> float:
    """Length of the union of some spans, for replicas and stages work at the same time."""
    total, until = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total / 1e9
