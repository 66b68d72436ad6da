"""Since when a run was in a steady state: the part of it whose figures do not depend on how long one waits.

The rule: a stretch drifts when its last third differs from its first beyond chance (rank test) and at a rate that
makes half as much again in the window's length, in TTFT or, upwards, in the requests in flight. The steady part begins
at the earliest of some candidate starts from which on nothing drifts any more, and ends with the last scheduled send;
what is answered after it is the drain. When even the window's second half drifts, the run was never steady. Instants
are told in seconds after the run's first scheduled send, warm-up included, or after its window begins without one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from labkit.measure.metrics import Window, counted, ttft_ms
from labkit.measure.records import RequestRecord
from labkit.measure.statistics import Summary

Values = NDArray[np.float64]

CANDIDATE_STEP, LATEST_START = 0.05, 0.5
"""Shares of the window: a run that needs more than half of it to settle was too short to say that it did."""
MIN_THIRD = 8
"""Requests in a third: with fewer the rank test cannot reach z = 3 often enough to mean anything."""
SURE_Z, FACTOR = 3.0, 1.5
"""Beyond chance (one in 700), and large enough to change what one would decide."""
MIN_RISE = 3.0
"""Requests in flight: a rise of fewer is what a Poisson stream does by itself at a low load."""
NUM_SAMPLES = 60
"""Instants at which the requests in flight are counted."""


def steady_state(records: Sequence[RequestRecord], window: Window) -> Summary:
    """{steady (None: too few requests to tell), start_s, end_s, settling_s, warmup_s, drain_s, growth_per_s, why, n,
    sentence}.

    `settling_s`: of the window, before it was steady. `growth_per_s`: least-squares slope of the requests in flight
    over the window. `why` it never was: queue (they grow and so does TTFT), filling (they grow, TTFT does not: an
    answer takes too much of the run for as many to leave as come), or drift (TTFT alone).
    """
    rows = sorted(counted(records, window), key=lambda record: record.scheduled_ns)
    origin = min([window.start_ns, *(record.scheduled_ns for record in records)])
    done = [record for record in rows if record.status == "completed" and record.first_ns]
    last = max((record.last_ns for record in done), default=window.end_ns)
    found: Summary = {
        "steady": None, "start_s": None, "end_s": (window.end_ns - origin) / 1e9, "settling_s": None,
        "warmup_s": (window.start_ns - origin) / 1e9, "drain_s": max(0, last - window.end_ns) / 1e9,
        "growth_per_s": None, "why": "", "n": len(done),
    }  # fmt: skip
    if len(done) < 3 * MIN_THIRD:
        sentence = f"Whether it was steady cannot be told: {len(done)} requests, and {3 * MIN_THIRD} are the least."
        return found | {"sentence": sentence}
    start = _steady_from(records, done, window)
    found["growth_per_s"] = _growth(records, window)
    if start is None:
        why, sentence = _restless(records, done, window, found["growth_per_s"])
        return found | {"steady": False, "why": why, "sentence": sentence}
    found |= {"steady": True, "start_s": (start - origin) / 1e9, "settling_s": (start - window.start_ns) / 1e9}
    return found | {"sentence": f"Steady from {found['start_s']:.1f} s to {found['end_s']:.1f} s."}


def _steady_from(records: Sequence[RequestRecord], done: Sequence[RequestRecord], window: Window) -> int | None:
    span = window.end_ns - window.start_ns
    for share in np.arange(0, LATEST_START + CANDIDATE_STEP / 2, CANDIDATE_STEP):
        start = window.start_ns + round(float(share) * span)
        waits = np.array([ttft_ms(record) for record in done if record.scheduled_ns >= start], np.float64)
        if len(waits) < 3 * MIN_THIRD:
            return None
        times = 1 / (1 - float(share))
        if not _drifts(waits, times) and not _rises(in_flight(records, start, window.end_ns), times):
            return start
    return None


def in_flight(records: Sequence[RequestRecord], start_ns: int, end_ns: int) -> Values:
    """Requests that had been scheduled and not answered, at NUM_SAMPLES instants from start to end."""
    sent = [record for record in records if record.sent_ns]
    begins = np.sort(np.array([record.scheduled_ns for record in sent], np.int64))
    ends = np.sort(np.array([record.end_ns or record.last_ns or record.sent_ns for record in sent], np.int64))
    at = np.linspace(start_ns, end_ns, NUM_SAMPLES).astype(np.int64)
    return (np.searchsorted(begins, at, "right") - np.searchsorted(ends, at, "right")).astype(np.float64)


def _thirds(values: Values) -> tuple[Values, Values]:
    third = len(values) // 3
    return values[:third], values[-third:]


def _beyond_chance(first: Values, last: Values) -> float:
    """z of the rank test: above 0 where the last are larger (ties count half)."""
    above = (last[:, None] > first[None, :]).mean() + (last[:, None] == first[None, :]).mean() / 2
    n, m = len(first), len(last)
    return float((above - 0.5) / np.sqrt((n + m + 1) / (12 * n * m)))


def _drifts(values: Values, times: float = 1.0) -> bool:
    """Up or down: a cold start makes the first ones slow. `times` the stretch is the window, to which the change is
    carried on: a queue that grows evenly looks the calmer, the later one begins to look.
    """
    first, last = _thirds(values)
    low, high = sorted((float(np.median(first)), float(np.median(last))))
    return abs(_beyond_chance(first, last)) > SURE_Z and (high - low) * times > (FACTOR - 1) * low


def _rises(values: Values, times: float = 1.0) -> bool:
    first, last = _thirds(values)
    before, rise = float(np.median(first)), float(np.median(last) - np.median(first)) * times
    return _beyond_chance(first, last) > SURE_Z and rise > (FACTOR - 1) * before and rise >= MIN_RISE


def _growth(records: Sequence[RequestRecord], window: Window) -> float:
    at = np.linspace(0, window.seconds, NUM_SAMPLES)
    return float(np.polyfit(at, in_flight(records, window.start_ns, window.end_ns), 1)[0]) if window.seconds else 0.0


def _restless(
    records: Sequence[RequestRecord], done: Sequence[RequestRecord], window: Window, growth: float
) -> tuple[str, str]:
    waits = np.array([ttft_ms(record) for record in done], np.float64)
    first, last = _thirds(waits)
    before, after = float(np.median(first)), float(np.median(last))
    if not _rises(in_flight(records, window.start_ns, window.end_ns)):
        sentence = f"TTFT drifts (median {before:.0f} ms in its first third, {after:.0f} ms in its last)."
        return "drift", f"Never steady: {sentence}"
    if _drifts(waits) and after > before:
        return "queue", f"Never steady: the queue grows by {growth:.2g} requests/s."
    answer_s = float(np.median([record.last_ns - record.scheduled_ns for record in done])) / 1e9
    return "filling", (
        f"Never steady: the requests in flight grow by {growth:.2g}/s while TTFT does not; an answer takes "
        f"{answer_s:.1f} s of a window of {window.seconds:.1f} s."
    )
