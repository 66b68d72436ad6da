"""What a run of load was: its records, its window, and whether the client itself kept the schedule.

Latencies are measured from the scheduled arrival, so a client that is late makes the server look slow; how
late it was is therefore part of every result. As Poisson arrivals see time averages, the lateness of the
sends is also a fair sample of how long anything that arrived had to wait for the client.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from labkit.measure.records import RequestRecord

FELL_BEHIND_MS = 5.0
"""More than one send in a hundred later than this: the client fell behind."""


class Lateness(msgspec.Struct, frozen=True):
    """Send after schedule, in ms, over the requests that were sent."""

    p50_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0
    n: int = 0


class LoadReport(msgspec.Struct, kw_only=True):
    """One run of load. Instants: ns of this host's CLOCK_MONOTONIC."""

    run_id: str
    workload: str
    records: list[RequestRecord] = []
    """In order of the schedule; empty when the caller took them as they came."""
    start_ns: int
    end_ns: int = 0
    """The last request was settled."""
    window_start_ns: int = 0
    """Start, or end of the warm-up."""
    window_end_ns: int = 0
    """The last scheduled arrival (closed loop: the last send); what comes after is the drain."""
    asked_rate: float = 0.0
    offered_rate: float = 0.0
    """Requests per second that really went out, by the instants of sending."""
    concurrency: int = 0
    seed: int = 0
    num_sent: int = 0
    num_cut: int = 0
    """Requests shortened to fit the context."""
    num_estimated: int = 0
    """Answers whose tokens per chunk are estimated."""
    num_connections: int = 0
    num_cold: int = 0
    """Requests that had to wait for a new connection."""
    lateness: Lateness = Lateness()
    fell_behind: bool = False
    notes: list[str] = []
    """Sentences that a reader of the figures must see."""
    precise_timer: bool = True
    scheduling: str = ""
    """How the client's process was scheduled."""
    options: dict[str, bool | float] = {}
    """What the server was found to take (usage, continuous_usage, token_ids ...)."""


def lateness_of(late_ns: Sequence[int]) -> Lateness:
    """Percentiles by numpy's linear rule."""
    if not len(late_ns):
        return Lateness()
    late_ms = np.asarray(late_ns, dtype=float) / 1e6
    p50, p99 = np.percentile(late_ms, [50, 99])
    return Lateness(round(float(p50), 4), round(float(p99), 4), round(float(late_ms.max()), 4), len(late_ms))


def judge(report: LoadReport) -> None:
    """Says whether the client fell behind, and adds the sentences that belong to the figures."""
    late = report.lateness
    report.fell_behind = late.p99_ms > FELL_BEHIND_MS
    if report.fell_behind:
        report.notes.append(
            f"The client fell behind its schedule: half of the sends were over {late.p50_ms:.1f} ms late, "
            f"one in a hundred more than {late.p99_ms:.1f} ms, the latest {late.max_ms:.1f} ms. "
            f"Latencies contain this."
        )
    if report.num_cold:
        report.notes.append(f"{report.num_cold} requests had to wait for a new connection.")
    if report.num_cut:
        report.notes.append(f"{report.num_cut} requests were shortened to fit the model's context.")
    if report.num_estimated:
        report.notes.append(
            f"{report.num_estimated} answers came in chunks of several tokens without running usage: how "
            f"many each bore is estimated from its text (their TPOT is exact, their ITL is not)."
        )


def rate_of(sent_ns: Sequence[int], start_ns: int) -> float:
    """Requests per second from the run's start to its last send; on time, it is the rate that was asked."""
    span_ns = max(sent_ns, default=start_ns) - start_ns
    return len(sent_ns) / span_ns * 1e9 if span_ns > 0 else 0.0
