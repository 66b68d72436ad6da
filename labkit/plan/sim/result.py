"""What a simulation tells: when each request got its tokens, and how full and how busy the replicas were meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.measure.metrics import Objective

Floats = NDArray[np.float64]
QUANTILES = (50, 90, 95, 99)
SETTLING = 0.2
"""Of the requests of an open loop, the first: the server was filling."""
MAX_POINTS = 512


class Series:
    """A quantity over time as means over equal spans; twice as long ones whenever there are too many."""

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self.span_s = 0.01
        self._max_points = max_points
        self._sums: list[float] = [0.0]
        self._last_s = self.value = 0.0
        self.peak = 0.0
        self._until_s = self.span_s

    def add(self, now: float, change: float) -> None:
        """The value is another from `now` on."""
        if now < self._until_s:
            self._sums[-1] += self.value * (now - self._last_s)
            self._last_s = now
        else:
            self._fill(now)
        self.value += change
        if self.value > self.peak:
            self.peak = self.value

    def _fill(self, now: float) -> None:
        while now >= self._until_s:
            self._sums[-1] += self.value * (self._until_s - self._last_s)
            self._last_s = self._until_s
            if len(self._sums) == self._max_points:
                pairs = zip(self._sums[::2], self._sums[1::2], strict=True)
                self._sums = [one + other for one, other in pairs]
                self.span_s *= 2
            self._sums.append(0.0)
            self._until_s = len(self._sums) * self.span_s
        self._sums[-1] += self.value * (now - self._last_s)
        self._last_s = now

    def means(self) -> Floats:
        """float [points], each over `span_s` seconds; the last over what there was of it."""
        spans = np.full(len(self._sums), self.span_s)
        spans[-1] = max(self._last_s - (len(self._sums) - 1) * self.span_s, 1e-12)
        return np.asarray(self._sums) / spans


@dataclass
class SimResult:
    """One entry a request, in the order in which they were given; seconds; NaN for what did not happen."""

    arrival_s: Floats
    """In a closed loop: when it was sent."""
    seen_s: Floats
    """The scheduler has it: the arrival itself, or when an engine that plans ahead looked next."""
    begun_s: Floats
    """Its first step began."""
    first_s: Floats
    finished_s: Floats
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    refused: dict[int, str]
    """Those that no replica can ever serve, and why."""
    waiting: Series
    """Requests in queues, of all replicas."""
    kv_blocks: Series
    kv_total_blocks: int
    kv_peak: float
    """The largest share of a replica's blocks that was in use."""
    num_preemptions: int
    num_steps: int
    cached_tokens: int = 0
    replica: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Who decoded it; −1: nobody."""
    frontend_s: Floats | float = 0.0
    """From its arrival until the router had it."""
    concurrency: int = 0
    """Of a closed loop."""

    @property
    def done(self) -> NDArray[np.bool_]:
        return ~np.isnan(self.finished_s)

    @property
    def ttft_s(self) -> Floats:
        return self.first_s - self.arrival_s

    @property
    def e2e_s(self) -> Floats:
        return self.finished_s - self.arrival_s

    @property
    def queue_s(self) -> Floats:
        return self.begun_s - self.arrival_s - self.frontend_s

    @property
    def tpot_s(self) -> Floats:
        """(last − first) ÷ (n − 1); NaN for answers of one token."""
        steps = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        return (self.finished_s - self.first_s) / steps

    @property
    def span_s(self) -> float:
        """From the first arrival to the last token."""
        if not self.done.any():
            return 0.0
        return float(np.nanmax(self.finished_s) - np.nanmin(self.arrival_s))

    def steady(self, whole: bool = False) -> NDArray[np.bool_]:
        """Which requests tell of the load as it goes on: of a closed loop neither each client's first, which finds an
        empty server, nor the last ones, behind whom nobody follows; of an open loop all but the first fifth. whole: all
        that were answered, as of a trace with its own arrivals."""
        kept, number = self.done.copy(), len(self.finished_s)
        if not self.concurrency:
            kept[: 0 if whole else int(number * SETTLING)] = False
            return kept
        ends = first_ones(number, self.concurrency)
        kept[:ends] = False
        kept[number - ends :] = False
        return kept

    @property
    def rate_span(self) -> tuple[NDArray[np.bool_], float]:
        """(which requests, in which time) the rates are of: of a closed loop those answered between the first and the
        last ones in flight, else all, from the first arrival to the last token."""
        ends = np.sort(self.finished_s[self.done])
        skipped = first_ones(len(ends), self.concurrency)
        if not skipped:
            return self.done, self.span_s
        first, last = ends[skipped - 1], ends[len(ends) - 1 - skipped]
        if not last > first:
            return self.done, self.span_s
        return self.done & (self.finished_s > first) & (self.finished_s <= last), float(last - first)

    def percentiles(self, counted: NDArray[np.bool_] | None = None) -> dict[str, dict[str, float]]:
        """{ttft_ms, tpot_ms, e2e_ms, queue_ms: {mean, p50, p90, p95, p99}} of those counted (None: all)."""
        counted = self.done if counted is None else counted
        of = {"ttft_ms": self.ttft_s, "tpot_ms": self.tpot_s, "e2e_ms": self.e2e_s, "queue_ms": self.queue_s}
        return {name: ladder_ms(values[counted]) for name, values in of.items()}

    def goodput(self, objective: Objective) -> float:
        """Requests a second that met every part of the objective."""
        return float(self.good(objective).sum() / self.span_s) if self.span_s else 0.0

    def good(self, objective: Objective) -> NDArray[np.bool_]:
        """Which requests met every part of it."""
        good = self.done
        if objective.ttft_ms is not None:
            good &= self.ttft_s * 1e3 <= objective.ttft_ms
        if objective.tpot_ms is not None:
            tpot_ms = self.tpot_s * 1e3
            good &= np.isnan(tpot_ms) | (tpot_ms <= objective.tpot_ms)
        return good

    def summary(
        self, objective: Objective | None = None, counted: NDArray[np.bool_] | None = None
    ) -> dict[str, Any]:
        """JSON-ready figures; latencies and what met the objective of those counted (None: all), rates as
        `rate_span` has them."""
        done = self.done
        counted = done if counted is None else counted
        within, span_s = self.rate_span
        rate = 1 / span_s if span_s else 0.0
        figures: dict[str, Any] = {
            **self.percentiles(counted),
            "requests": len(done),
            "completed": int(done.sum()),
            "counted": int(counted.sum()),
            "refused": len(self.refused),
            "requests_per_s": float(within.sum() * rate),
            "tokens_per_s": float(self.output_tokens[within].sum() * rate),
            "prompt_tokens_per_s": float(self.prompt_tokens[within].sum() * rate),
            "seconds": self.span_s,
            "kv_peak": self.kv_peak,
            "queue_peak": int(self.waiting.peak),
            "preemptions": self.num_preemptions,
            "steps": self.num_steps,
            "cached_tokens": self.cached_tokens,
        }
        if objective is not None and not objective.asks_nothing:
            figures["objective"] = objective.to_dict()
            asked = counted.sum() + len(self.refused)
            figures["attainment"] = float((self.good(objective) & counted).sum() / max(1, asked))
            figures["goodput"] = figures["attainment"] * figures["requests_per_s"]
        return figures

    def over_time(self) -> dict[str, Any]:
        """Queue and KV use as they went: {waiting: {span_s, values}, kv: {span_s, values (shares)}}."""
        kv = self.kv_blocks.means() / max(1, self.kv_total_blocks)
        return {
            "waiting": {"span_s": self.waiting.span_s, "values": self.waiting.means().round(3).tolist()},
            "kv": {"span_s": self.kv_blocks.span_s, "values": kv.round(4).tolist()},
        }


def first_ones(number: int, concurrency: int) -> int:
    """Requests of a closed loop that are the first of their client, and as many are the last: at most a third each."""
    return min(concurrency, number // 3)


def ladder_ms(seconds: Floats) -> dict[str, float]:
    """{mean, p50, p90, p95, p99} in ms, numpy's linear percentile; 0 of nothing."""
    values = seconds[~np.isnan(seconds)] * 1e3
    if not len(values):
        return {"mean": 0.0} | {f"p{q}": 0.0 for q in QUANTILES}
    steps = np.percentile(values, QUANTILES).tolist()
    return {"mean": float(values.mean())} | {f"p{q}": value for q, value in zip(QUANTILES, steps, strict=True)}
