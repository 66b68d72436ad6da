"""Where the time of a load that goes on went, and since when it is steady: worked out anew every few seconds.

The same `explain` and `steady_state` as for a run that is over, over the newest requests and steps of the current
layout and rate. Rows of single collectives do not travel to a page; whom the ranks wait for is told by their waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit.measure.achieved import Roofs
from labkit.measure.breakdown import handoff_figures, step_share
from labkit.measure.explain import explain
from labkit.measure.metrics import Window
from labkit.measure.records import RequestRecord, StepRecord
from labkit.measure.steady import steady_state

_EVERY_S = 2.5
_HELD_STEPS = 1000


@dataclass
class Told:
    """What `explain` reads of a run, without its rows of collectives (`[]` counts as none left)."""

    summary: dict[str, Any]
    records: list[RequestRecord]
    step_records: list[StepRecord]
    window: Window
    collectives: Any = field(default_factory=list)


class Answers:
    """Add steps as they come; `snapshot` has the newest answers."""

    def __init__(self) -> None:
        self.roofs: Roofs | None = None
        self._steps: deque[StepRecord] = deque(maxlen=_HELD_STEPS)
        self._since_ns = 0
        self._at, self._found = 0.0, _nothing()

    def add(self, steps: Iterable[StepRecord]) -> None:
        self._steps.extend(step for step in steps if step.start_ns >= self._since_ns)

    def reset(self, now_ns: int) -> None:
        """Another layout or rate: what began before is not its."""
        self._steps.clear()
        self._since_ns = now_ns
        self._at, self._found = 0.0, _nothing()

    def snapshot(self, rows: Sequence[RequestRecord], about: Mapping[str, Any]) -> dict[str, Any]:
        """{explanation (as `Explanation.to_dict`; None before the first request), steady}.

        about: of the load that goes on, layout, model, workload, rate, environment and ranks.
        """
        if rows and time.monotonic() - self._at > _EVERY_S:
            self._found = self._answers(list(rows), about)
            self._at = time.monotonic()
        return self._found

    def _answers(self, rows: list[RequestRecord], about: Mapping[str, Any]) -> dict[str, Any]:
        window, steps = Window.of(rows), list(self._steps)
        busy = Window(min((s.start_ns for s in steps), default=0), max((s.end_ns for s in steps), default=0))
        summary = {**about, "step_share": step_share(steps, busy, about.get("ranks") or ()),
                   "handoff": handoff_figures(rows)}  # fmt: skip
        told = Told(summary, rows, steps, Window(window.start_ns, max(window.end_ns, busy.end_ns)))
        steady = steady_state(rows, window)
        origin_ns = min(record.scheduled_ns for record in rows)
        start_ns = None if steady["start_s"] is None else origin_ns + round(steady["start_s"] * 1e9)
        return {"explanation": explain(told, roofs=self.roofs).to_dict(), "steady": {**steady, "start_ns": start_ns}}


def _nothing() -> dict[str, Any]:
    return {"explanation": None, "steady": None}


def explain_stored(run: Any) -> dict[str, Any]:
    """Of a `Run`, without reading its collectives: what a page can afford."""
    return explain(Told(run.summary, run.records, run.step_records, run.window)).to_dict()
