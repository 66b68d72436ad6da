"""The last seconds, for a page that moves: the same definitions as the whole-run figures, kept ready.

A request is worked out once, when it ends, into one row of a preallocated table; a snapshot is then a few
numpy calls over the rows that ended in the window. Objectives are applied in the snapshot, so they can be
dragged. A switch of layout starts the ladders anew (`reset`), while the series over time go on.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from labkit.measure import metrics
from labkit.measure.breakdown import SHARES, TTFT_PARTS, phase_of, ttft_parts_ms, ttft_table
from labkit.measure.metrics import Objective
from labkit.measure.records import STATUSES, RequestRecord, StepRecord
from labkit.measure.statistics import Summary, ladder

_NUM_FIGURES = 6
_TTFT, _TPOT, _E2EL, _STATUS, _INPUT, _OUTPUT = range(_NUM_FIGURES)
_COMPLETED = STATUSES.index("completed")
_SECOND_NS = 1_000_000_000


class SlidingWindow:
    """Add records as they end; `snapshot` says what the requests of the last `seconds` felt.

    capacity: how many requests are remembered at most; older ones fall out also when they are young enough.
    """

    def __init__(self, seconds: float = 20.0, capacity: int = 4096, series_s: int = 60) -> None:
        self.seconds = seconds
        self._series_s = series_s
        self._ended_ns = np.zeros(capacity, np.int64)
        self._sent_after_ns = np.zeros(capacity, np.int64)
        self._figures = np.full((capacity, _NUM_FIGURES + len(TTFT_PARTS)), np.nan)
        self._count = 0
        self._origin_ns = self._since_ns = time.monotonic_ns()
        self._tokens: dict[int, int] = defaultdict(int)
        self.num_requeued = 0

    def start(self, now_ns: int) -> None:
        """A new load: forget everything; the series count their seconds from here."""
        self._count = self.num_requeued = 0
        self._origin_ns = self._since_ns = now_ns
        self._tokens.clear()

    def reset(self, now_ns: int) -> None:
        """A new layout is ready: only requests scheduled from now on belong to it."""
        self._since_ns = now_ns
        self.num_requeued = 0

    @property
    def since_ns(self) -> int:
        """Requests scheduled before belong to another layout or rate."""
        return self._since_ns

    def samples(self, now_ns: int) -> dict[str, NDArray[np.float64]]:
        """ttft_ms and tpot_ms of the requests that the ladders are made of."""
        figures = self._figures[self._rows(now_ns)]
        done = figures[figures[:, _STATUS] == _COMPLETED]
        return {"ttft_ms": _finite(done[:, _TTFT]), "tpot_ms": _finite(done[:, _TPOT])}

    def add(self, record: RequestRecord) -> None:
        if metrics.is_requeued(record):
            self.num_requeued += 1
            return
        at = self._count % len(self._ended_ns)
        self._ended_ns[at] = record.last_ns or record.end_ns or record.sent_ns or record.scheduled_ns
        self._sent_after_ns[at] = record.scheduled_ns
        self._figures[at] = _row(record)
        self._count += 1
        for at_ns, k in zip(record.chunk_ns, record.chunk_tokens, strict=True):
            self._tokens[self._second(at_ns)] += k

    def snapshot(self, now_ns: int, objective: Objective | None = None) -> Summary:
        objective = objective or Objective()
        rows = self._rows(now_ns)
        figures = self._figures[rows]
        done = figures[figures[:, _STATUS] == _COMPLETED]
        missed = len(figures) - len(done)
        span_s = min(self.seconds, max(now_ns - self._since_ns, 0) / 1e9)
        good = int(_good(figures, objective).sum())
        statuses = np.bincount(figures[:, _STATUS].astype(np.intp), minlength=len(STATUSES)).tolist()
        return {
            "span_s": span_s,
            "requests": {"ended": len(figures), **dict(zip(STATUSES, statuses, strict=True))}
            | {"requeued": self.num_requeued},
            "ttft_ms": ladder(_finite(done[:, _TTFT]), missed),
            "tpot_ms": ladder(_finite(done[:, _TPOT]), missed),
            "e2el_ms": ladder(_finite(done[:, _E2EL]), missed),
            "throughput": _rates(done, span_s),
            "goodput": metrics.goodput_of(good, len(figures), objective, span_s),
            **ttft_table(_whole_rows(done[:, _NUM_FIGURES:])),
            "series": self._series(now_ns, objective),
        }

    def _rows(self, now_ns: int) -> NDArray[np.intp]:
        held = min(self._count, len(self._ended_ns))
        ended = self._ended_ns[:held]
        young = (ended > now_ns - round(self.seconds * 1e9)) & (ended <= now_ns)
        return np.flatnonzero(young & (self._sent_after_ns[:held] >= self._since_ns))

    def _second(self, at_ns: int) -> int:
        return (at_ns - self._origin_ns) // _SECOND_NS

    def _series(self, now_ns: int, objective: Objective) -> Summary:
        """Per whole second since `start`.

        Requests that ended and good ones by their end, tokens by arrival.
        """
        last = max(0, self._second(now_ns))  # a load is started a moment before its first instant
        first = max(0, last - self._series_s)
        for second in [second for second in self._tokens if second < first]:
            del self._tokens[second]
        held = min(self._count, len(self._ended_ns))
        seconds = (self._ended_ns[:held] - self._origin_ns) // _SECOND_NS - first
        inside = (seconds >= 0) & (seconds < last - first)
        figures, seconds = self._figures[:held][inside], seconds[inside]
        completed = figures[:, _STATUS] == _COMPLETED
        size = last - first
        return {
            "t_s": list(range(first, last)),
            "requests": np.bincount(seconds[completed], minlength=size).tolist(),
            "good": np.bincount(seconds[_good(figures, objective)], minlength=size).tolist(),
            "input_tokens": np.bincount(
                seconds[completed], figures[completed, _INPUT], minlength=size
            ).tolist(),
            "output_tokens": [self._tokens.get(second, 0) for second in range(first, last)],
        }


def _row(record: RequestRecord) -> list[float]:
    figures = (metrics.ttft_ms(record), metrics.tpot_ms(record), metrics.e2el_ms(record))
    parts = ttft_parts_ms(record) or [math.nan] * len(TTFT_PARTS)
    known = [math.nan if value is None else value for value in figures]
    return [
        *known,
        STATUSES.index(record.status),
        record.prompt_tokens,
        metrics.num_tokens(record),
        *parts,
    ]


def _good(figures: NDArray[np.float64], objective: Objective) -> NDArray[np.bool_]:
    """`metrics.is_good`, a column at a time."""
    good = (figures[:, _STATUS] == _COMPLETED) & (figures[:, _OUTPUT] >= 1)
    if objective.asks_nothing:
        return good
    judged = np.zeros(len(figures), bool)
    for column, limit in ((_TTFT, objective.ttft_ms), (_TPOT, objective.tpot_ms)):
        if limit is not None:
            known = ~np.isnan(figures[:, column])
            judged |= known
            good &= ~known | (figures[:, column] <= limit)
    return good & judged


def _rates(done: NDArray[np.float64], span_s: float) -> Summary:
    """Of the requests that ended in the window: in a steady state, what leaves per second."""
    counts = {
        "requests_per_s": len(done),
        "input_tokens_per_s": float(done[:, _INPUT].sum()),
        "output_tokens_per_s": float(done[:, _OUTPUT].sum()),
    }
    return {name: count / span_s if span_s else None for name, count in counts.items()}


def _finite(column: NDArray[np.float64]) -> NDArray[np.float64]:
    return column[~np.isnan(column)]


def _whole_rows(parts: NDArray[np.float64]) -> NDArray[np.float64]:
    return parts[~np.isnan(parts[:, 0])]


class StepMeter:
    """What the ranks did in the last seconds, and what the steps produced, in buckets of a tenth of a
    second.
    """

    _BUCKET_NS = _SECOND_NS // 10

    def __init__(self, seconds: float = 5.0) -> None:
        self.seconds = seconds
        self._ranks: dict[int, dict[int, list[int]]] = {}
        self._phases: dict[int, dict[str, list[int]]] = {}
        self._tokens: dict[int, list[int]] = {}
        self._since_ns = 0

    def reset(self, now_ns: int) -> None:
        self._ranks.clear()
        self._phases.clear()
        self._tokens.clear()
        self._since_ns = now_ns

    def add(self, steps: Iterable[StepRecord]) -> None:
        for step in steps:
            if step.start_ns >= self._since_ns:
                self._add(step)

    def _add(self, step: StepRecord) -> None:
        bucket = step.end_ns // self._BUCKET_NS
        ranks = self._ranks.setdefault(bucket, {})
        spent = list(zip(step.ranks, step.compute_ns, step.wait_ns, step.transfer_ns, strict=True))
        for rank, *parts in spent:
            ranks[rank] = _plus(ranks.get(rank, [0, 0, 0]), parts)
        sums = [sum(step.compute_ns), sum(step.wait_ns), sum(step.transfer_ns)]
        sums.append((step.end_ns - step.start_ns) * len(step.ranks))
        phases, phase = self._phases.setdefault(bucket, {}), phase_of(step)
        phases[phase] = _plus(phases.get(phase, [0, 0, 0, 0]), sums)
        tokens = [step.prefill_tokens, step.num_decode_seqs, 1]
        self._tokens[bucket] = _plus(self._tokens.get(bucket, [0, 0, 0]), tokens)

    def snapshot(self, now_ns: int, ranks: Sequence[int] = ()) -> Summary:
        """`step_share` as `breakdown.step_share` has it, and `steps` {per_s, prefill_tokens_per_s, …}."""
        oldest = (now_ns - round(self.seconds * 1e9)) // self._BUCKET_NS + 1
        self._forget(oldest)
        span_ns = max(1, now_ns - max(self._since_ns, oldest * self._BUCKET_NS))  # of whole buckets
        by_rank = {rank: [0, 0, 0] for rank in ranks}
        for bucket in self._ranks.values():
            for rank, parts in bucket.items():
                by_rank[rank] = _plus(by_rank.get(rank, [0, 0, 0]), parts)
        rows = [{"rank": rank, **_share(parts, span_ns)} for rank, parts in sorted(by_rank.items())]
        mean = {name: sum(row[name] for row in rows) / len(rows) if rows else None for name in SHARES}
        totals = [sum(column) for column in zip(*self._tokens.values(), strict=True)] or [0, 0, 0]
        names = ("prefill_tokens_per_s", "decode_tokens_per_s", "per_s")
        return {
            "step_share": {**mean, "by_rank": rows, "by_phase": self._by_phase()},
            "steps": {name: total / (span_ns / 1e9) for name, total in zip(names, totals, strict=True)},
        }

    def _by_phase(self) -> Summary:
        sums: dict[str, list[int]] = {}
        for bucket in self._phases.values():
            for phase, parts in bucket.items():
                sums[phase] = _plus(sums.get(phase, [0, 0, 0, 0]), parts)
        return {phase: _share(parts[:3], parts[3]) for phase, parts in sums.items()}

    def _forget(self, oldest: int) -> None:
        for buckets in (self._ranks, self._phases, self._tokens):
            for old in [bucket for bucket in buckets if bucket < oldest]:
                del buckets[old]


def _plus(a: list[int], b: Sequence[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _share(parts: Sequence[int], span_ns: int) -> dict[str, float]:
    shares = [part / span_ns if span_ns else 0.0 for part in parts]
    return dict(zip(SHARES, [*shares, max(0.0, 1.0 - sum(shares))], strict=True))
