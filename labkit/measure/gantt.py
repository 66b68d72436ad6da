"""The last moments of a pipeline, step by step: when each stage was at work, and on what.

A step's record has each rank's beginning and end and the sums between them. A stage first waits for the one in front
(idle), so its bar is drawn as idle, compute, then everything in collectives: sums, in the order in which they mostly
happen. A stage's ranks work together, so the one that was at work longest stands for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from labkit.layout import Layout
from labkit.measure.records import StepRecord

SPAN_S = 1.0
MAX_BARS = 120
"""Of all rows together: what a picture can show, and a frame may carry."""
_HELD_STEPS = 512


class StageGantt:
    """Add steps as they come; `snapshot` has the last second of them, or what fits."""

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=_HELD_STEPS)
        self._since_ns = 0

    def reset(self, now_ns: int) -> None:
        """Another layout: steps that began before now are not its."""
        self._steps.clear()
        self._since_ns = now_ns

    def add(self, steps: Iterable[StepRecord]) -> None:
        self._steps.extend(step for step in steps if step.start_ns >= self._since_ns)

    def snapshot(self) -> dict[str, Any] | None:
        """span_ms and `rows` [{replica, stage, ranks, bars [[start, idle, compute, crossing] in ms, …]}].

        None where no step had stages. The span ends with the last step's end.
        """
        steps = [step for step in list(self._steps) if Layout.parse(step.layout).pp > 1]
        if not steps:
            return None
        end_ns = max(max(step.rank_end_ns) for step in steps)
        steps = [step for step in steps if min(step.rank_start_ns) >= end_ns - SPAN_S * 1e9]
        steps = sorted(steps, key=lambda step: min(step.rank_start_ns))[-_fitting(steps) :]
        begin_ns = min((min(step.rank_start_ns) for step in steps), default=end_ns)
        rows: dict[tuple[int, int], dict[str, Any]] = {}
        for step in steps:
            for stage, ranks in enumerate(_stages(step)):
                row = rows.setdefault(
                    (step.replica, stage), {"replica": step.replica, "stage": stage, "ranks": ranks, "bars": []}
                )
                row["bars"].append(_bar(step, ranks, begin_ns))
        return {"span_ms": (end_ns - begin_ns) / 1e6, "rows": [rows[key] for key in sorted(rows)]}


def _fitting(steps: list[StepRecord]) -> int:
    """How many of the newest steps have no more than MAX_BARS bars; at least one."""
    num_stages = max((Layout.parse(step.layout).pp for step in steps), default=1)
    return max(1, MAX_BARS // num_stages)


def _stages(step: StepRecord) -> list[list[int]]:
    """The replica's ranks, stage by stage: a stage's are neighbours."""
    pp, ranks = Layout.parse(step.layout).pp, sorted(step.ranks)
    size = len(ranks) // pp
    return [ranks[i * size : (i + 1) * size] for i in range(pp)]


def _bar(step: StepRecord, ranks: list[int], begin_ns: int) -> list[float]:
    at = max((step.ranks.index(rank) for rank in ranks), key=lambda i: step.compute_ns[i] + step.transfer_ns[i])
    idle_ns = step.idle_ns[at] if step.idle_ns else 0
    crossing_ns = step.wait_ns[at] + step.transfer_ns[at]
    return [
        round(ns / 1e6, 2) for ns in (step.rank_start_ns[at] - begin_ns, idle_ns, step.compute_ns[at], crossing_ns)
    ]
