"""What a user felt, from the rows of a run: each figure is defined once, here, from named instants.

t0 is the scheduled arrival, so a server that makes the sender late pays for it. Latencies are over
successes, and the same percentiles with failures as infinite stand beside them (`adjusted`). Percentiles
are exact on the rows, by numpy's `linear` method: rank (n - 1) q, interpolated. Rates are over the window
from the end of the warm-up to the last scheduled send; what is answered after it (the drain) is told apart.
A request that lived through a switch of layout (`requeued`) belongs to no layout and is counted, not
measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from labkit.measure.records import STATUSES, RequestRecord
from labkit.measure.statistics import Summary, few, ladder, percentile, wilson_interval

__all__ = [
    "Objective",
    "Summary",
    "Window",
    "counted",
    "few",
    "goodput",
    "goodput_of",
    "ladder",
    "percentile",
    "summarize",
    "wilson_interval",
]


@dataclass(frozen=True, slots=True)
class Objective:
    """What counts as good service. A part that is None is not asked."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("ttft", self.ttft_ms), ("tpot", self.tpot_ms)):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(
                    f"The objective for {name} is {value} ms; it must be a positive number, or left out."
                )

    @classmethod
    def parse(cls, text: str) -> Objective:
        """`ttft=500,tpot=50`, in milliseconds; either may be left out, and an empty text asks nothing."""
        parts: dict[str, float] = {}
        for item in filter(None, (piece.strip() for piece in text.split(","))):
            name, _, value = item.partition("=")
            name = name.strip().lower().removesuffix("_ms")
            try:
                parts[f"{name}_ms"] = float(value.strip().removesuffix("ms"))
            except ValueError:
                name = ""
            if name not in ("ttft", "tpot"):
                raise ValueError(
                    f"{item!r} is not an objective; write ttft=MS, tpot=MS or both, as in ttft=500,tpot=50."
                )
        return cls(**parts)

    @property
    def asks_nothing(self) -> bool:
        return self.ttft_ms is None and self.tpot_ms is None

    def to_dict(self) -> dict[str, float | None]:
        return {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms}


@dataclass(frozen=True, slots=True)
class Window:
    """From the end of the warm-up to the last scheduled send, in the clock of the client."""

    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        return max(0, self.end_ns - self.start_ns) / 1e9

    @classmethod
    def of(cls, records: Iterable[RequestRecord]) -> Window:
        sends = [record.scheduled_ns for record in records if not record.warmup]
        return cls(min(sends), max(sends)) if sends else cls(0, 0)


# ---- one request -------------------------------------------------------------------------------------------


def is_requeued(record: RequestRecord) -> bool:
    return record.server is not None and record.server.requeued


def num_tokens(record: RequestRecord) -> int:
    """The server's `usage.completion_tokens`; where it sent no usage, the tokens counted in the chunks."""
    return record.n or sum(record.chunk_tokens)


def ttft_ms(record: RequestRecord) -> float | None:
    """Scheduled arrival to the first chunk that bore a token; None when none came."""
    return (record.first_ns - record.scheduled_ns) / 1e6 if record.first_ns else None


def tpot_ms(record: RequestRecord) -> float | None:
    """(last token - first token) / (n - 1).

    None for n < 2, and when all tokens came in one chunk (nothing to time).
    """
    n = num_tokens(record)
    if n < 2 or record.last_ns <= record.first_ns:
        return None
    return (record.last_ns - record.first_ns) / 1e6 / (n - 1)


def e2el_ms(record: RequestRecord) -> float | None:
    """Scheduled arrival to the last token's chunk (not to the stream's close)."""
    return (record.last_ns - record.scheduled_ns) / 1e6 if record.last_ns else None


def itl_ms(record: RequestRecord) -> list[float]:
    """Gaps per token: a chunk of k tokens after a gap g is k samples of g / k. Their sum is last - first."""
    chunks = _chunks(record)
    samples: list[float] = []
    for (before_ns, _), (at_ns, k) in zip(chunks, chunks[1:], strict=False):
        samples += [(at_ns - before_ns) / 1e6 / k] * k
    return samples


def icl_ms(record: RequestRecord) -> list[float]:
    """Gaps between chunks, whatever they bore: kept apart from ITL, which it is often mistaken for."""
    chunks = _chunks(record)
    return [(after[0] - before[0]) / 1e6 for before, after in zip(chunks, chunks[1:], strict=False)]


def _chunks(record: RequestRecord) -> list[tuple[int, int]]:
    return [(at_ns, k) for at_ns, k in zip(record.chunk_ns, record.chunk_tokens, strict=True) if k > 0]


def is_good(record: RequestRecord, objective: Objective) -> bool:
    """All objectives met. An answer of one token has no TPOT and is judged by its TTFT.

    With nothing to judge, a miss.
    """
    if record.status != "completed" or num_tokens(record) < 1:
        return False
    checks = ((ttft_ms(record), objective.ttft_ms), (tpot_ms(record), objective.tpot_ms))
    judged = [value <= limit for value, limit in checks if limit is not None and value is not None]
    return objective.asks_nothing or (bool(judged) and all(judged))


# ---- many requests -----------------------------------------------------------------------------------------


def counted(records: Iterable[RequestRecord], window: Window) -> list[RequestRecord]:
    """The requests that the figures are about: scheduled in the window, after the warm-up, of one layout."""
    return [
        record
        for record in records
        if not record.warmup
        and not is_requeued(record)
        and window.start_ns <= record.scheduled_ns <= window.end_ns
    ]


def summarize(
    records: Sequence[RequestRecord], objective: Objective | None = None, window: Window | None = None
) -> Summary:
    """requests, {ttft,tpot,itl,icl,e2el,lateness}_ms, throughput, goodput, window, drain."""
    objective = objective or Objective()
    window = window or Window.of(records)
    rows = counted(records, window)
    done = [record for record in rows if record.status == "completed"]
    return {
        "requests": _count(records, rows),
        **_latencies(rows, done),
        "throughput": _throughput(records, window),
        "goodput": goodput(rows, objective, window.seconds),
        "window": {"start_ns": window.start_ns, "end_ns": window.end_ns, "seconds": window.seconds},
        "drain": _drain(rows, window),
    }


def _count(records: Sequence[RequestRecord], rows: list[RequestRecord]) -> Summary:
    """`scheduled` is the sum of the five statuses; requeued and warm-up requests are beside it."""
    by_status = {status: sum(record.status == status for record in rows) for status in STATUSES}
    answered = [num_tokens(record) for record in rows if record.status == "completed"]
    return {
        "scheduled": len(rows),
        **by_status,
        "requeued": sum(is_requeued(record) and not record.warmup for record in records),
        "warmup": sum(record.warmup for record in records),
        "no_token": answered.count(0),
        "one_token": answered.count(1),
    }


def _latencies(rows: list[RequestRecord], done: list[RequestRecord]) -> Summary:
    missed = len(rows) - len(done)
    gaps = [gap for record in done for gap in itl_ms(record)]
    chunk_gaps = [gap for record in done for gap in icl_ms(record)]
    sent = [record for record in rows if record.sent_ns]
    return {
        "ttft_ms": ladder(_known(map(ttft_ms, done)), missed),
        "tpot_ms": ladder(_known(map(tpot_ms, done)), missed),
        "itl_ms": ladder(gaps),
        "icl_ms": ladder(chunk_gaps),
        "e2el_ms": ladder(_known(map(e2el_ms, done)), missed),
        "lateness_ms": ladder([(record.sent_ns - record.scheduled_ns) / 1e6 for record in sent]),
    }


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _throughput(records: Sequence[RequestRecord], window: Window) -> Summary:
    """What arrived inside the window, whenever it had been asked: in a steady state that is what leaves per
    second.

    A prompt counts when its first token arrives, an output token when its chunk does, a request with its
    last token.
    """
    start, end, seconds = window.start_ns, window.end_ns, window.seconds
    requests = inputs = outputs = 0
    for record in records:
        if is_requeued(record):
            continue
        requests += record.status == "completed" and record.last_ns > 0 and start <= record.last_ns <= end
        inputs += record.prompt_tokens if record.first_ns and start <= record.first_ns <= end else 0
        outputs += sum(k for at_ns, k in _chunks(record) if start <= at_ns <= end)
    rates = {"requests_per_s": requests, "input_tokens_per_s": inputs, "output_tokens_per_s": outputs}
    return {name: count / seconds if seconds else None for name, count in rates.items()}


def goodput(rows: Sequence[RequestRecord], objective: Objective, seconds: float) -> Summary:
    """Requests of the window that met every objective, per second and as a share of those scheduled."""
    good = sum(is_good(record, objective) for record in rows)
    return goodput_of(good, len(rows), objective, seconds)


def goodput_of(good: int, scheduled: int, objective: Objective, seconds: float) -> Summary:
    low, high = wilson_interval(good, scheduled)
    return {
        "objective": objective.to_dict(),
        "good": good,
        "scheduled": scheduled,
        "requests_per_s": good / seconds if seconds else None,
        "attainment": good / scheduled if scheduled else None,
        "attainment_interval": [low, high],
    }


def _drain(rows: list[RequestRecord], window: Window) -> Summary:
    """What the server still owed when the last request had been sent."""
    late = [record for record in rows if record.last_ns > window.end_ns]
    tokens = sum(k for record in late for at_ns, k in _chunks(record) if at_ns > window.end_ns)
    seconds = max((record.last_ns - window.end_ns for record in late), default=0) / 1e9
    return {"seconds": seconds, "requests": len(late), "output_tokens": tokens}
