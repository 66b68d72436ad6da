"""The last steps, rank by rank: when each computed, waited, transferred, stood idle, and who was last.

Made of the recorder's own rows, not of sums: a rank's step is cut at each collective into compute (before it), wait
(until the last had entered) and transfer (from then on); a receive's wait is its stage's bubble, idle. Between steps a
rank has nothing. Where clocks are not one, ranks' rows may be shifted against each other, and waits are by duration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.measure.recorder import AXIS_CODES, MERGED_DTYPE, OP_CODES
from labkit.measure.records import StepRecord

KINDS = ("compute", "wait", "transfer", "idle")
_COMPUTE, _WAIT, _TRANSFER, _IDLE = range(4)
MAX_STEPS, MAX_BARS = 8, 600
_POINT_TO_POINT = (OP_CODES["send"], OP_CODES["recv"])
Rows = NDArray[np.void]
"""MERGED_DTYPE."""


def timeline(steps: Sequence[StepRecord], rows: Rows) -> dict[str, Any] | None:
    """span_ms, `steps` [{step_id, replica, start_ms, end_ms, prefill_tokens, decodes}], `ranks` [{rank, bars, last,
    of}].

    bars: [start_ms, length_ms, kind] in order, kind an index into KINDS. last, of: how many symmetric collectives the
    rank was the last to enter, of how many. The newest steps that have MAX_BARS bars at most; None without steps.
    """
    newest = _fitting(sorted(steps, key=lambda step: step.step_id)[-MAX_STEPS:], rows)
    if not newest:
        return None
    begin_ns = min(min(step.rank_start_ns) for step in newest)
    end_ns = max(max(step.rank_end_ns) for step in newest)
    bars: dict[int, list[list[float]]] = {}
    for step in newest:
        for place, rank in enumerate(step.ranks):
            mine = rows[(rows["epoch"] == step.epoch) & (rows["step_id"] == step.step_id) & (rows["rank"] == rank)]
            own = _bars(step.rank_start_ns[place], step.rank_end_ns[place], mine)
            bars.setdefault(rank, []).extend(_told(own, begin_ns))
    last, of = _who_was_last(newest, rows)
    return {
        "span_ms": (end_ns - begin_ns) / 1e6,
        "steps": [_step(step, begin_ns) for step in newest],
        "ranks": [{"rank": rank, "bars": bars[rank], "last": last[rank], "of": of[rank]} for rank in sorted(bars)],
    }


def _fitting(steps: Sequence[StepRecord], rows: Rows) -> list[StepRecord]:
    """As many of the newest as fit; at least one, so that a step of very many collectives is seen too."""
    found: list[StepRecord] = []
    num_bars = 0
    for step in reversed(steps):
        num_bars += len(step.ranks) + 2 * int(np.count_nonzero(rows["step_id"] == step.step_id))
        if found and num_bars > MAX_BARS:
            break
        found.append(step)
    return found[::-1]


def _bars(start_ns: int, end_ns: int, mine: Rows) -> list[tuple[int, int, int]]:
    """(from, to, kind) of one rank's step."""
    found = []
    at = start_ns
    for call in mine[np.argsort(mine["enter_ns"], kind="stable")]:
        enter, leave = max(int(call["enter_ns"]), at), int(call["exit_ns"])
        met = min(leave, int(call["enter_ns"] + call["wait_ns"]))
        bubble = call["op"] == OP_CODES["recv"] and call["axis"] == AXIS_CODES["pp"]
        found += [(at, enter, _COMPUTE), (enter, met, _IDLE if bubble else _WAIT), (max(enter, met), leave, _TRANSFER)]
        at = max(at, leave)
    found.append((at, end_ns, _COMPUTE))
    return [(begin, end, kind) for begin, end, kind in found if end > begin]


def _told(bars: Sequence[tuple[int, int, int]], begin_ns: int) -> list[list[float]]:
    return [[round((at - begin_ns) / 1e6, 4), round((to - at) / 1e6, 4), kind] for at, to, kind in bars]


def _step(step: StepRecord, begin_ns: int) -> dict[str, Any]:
    return {
        "step_id": step.step_id,
        "replica": step.replica,
        "start_ms": (min(step.rank_start_ns) - begin_ns) / 1e6,
        "end_ms": (max(step.rank_end_ns) - begin_ns) / 1e6,
        "prefill_tokens": step.prefill_tokens,
        "decodes": step.num_decode_seqs,
    }


def _who_was_last(steps: Sequence[StepRecord], rows: Rows) -> tuple[Counter[int], Counter[int]]:
    """Of each rank: in how many calls it was the last (waited least), and in how many it took part with others."""
    ids = [step.step_id for step in steps]
    calls = rows[np.isin(rows["step_id"], ids) & ~np.isin(rows["op"], _POINT_TO_POINT)]
    last: Counter[int] = Counter()
    of: Counter[int] = Counter()
    if not len(calls):
        return last, of
    calls = calls[np.lexsort((calls["wait_ns"], calls["seq"], calls["group_id"], calls["epoch"]))]
    keys = np.stack([calls["epoch"], calls["group_id"], calls["seq"]], axis=1).astype(np.int64)
    begins = np.flatnonzero(np.append(True, (keys[1:] != keys[:-1]).any(axis=1)))
    for begin, end in zip(begins, np.append(begins[1:], len(calls)), strict=True):
        if end - begin > 1:
            last[int(calls["rank"][begin])] += 1
            of.update(calls["rank"][begin:end].tolist())
    return last, of


class TimelineTeller:
    """Keeps the newest rows and steps, and tells at most every `period_s`."""

    def __init__(self, period_s: float = 0.5) -> None:
        self._period_ns = round(period_s * 1e9)
        self._rows: list[Rows] = []
        self._steps: list[StepRecord] = []
        self._told_ns = 0

    def add_rows(self, rows: Rows) -> None:
        """Of steps whose records come next."""
        self._rows = [*self._rows[-3:], rows]

    def add_steps(self, steps: Sequence[StepRecord], now_ns: int) -> dict[str, Any] | None:
        """The timeline, when it is time for one."""
        self._steps = [*self._steps, *steps][-MAX_STEPS:]
        if now_ns - self._told_ns < self._period_ns:
            return None
        self._told_ns = now_ns
        rows = np.concatenate(self._rows) if self._rows else np.zeros(0, MERGED_DTYPE)
        return timeline([step for step in self._steps if step.epoch == self._steps[-1].epoch], rows)

