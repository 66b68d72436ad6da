"""What is asked of a server, apart from what it is asked to answer: latencies at a percentile, and tokens per second.

One answer's tokens per second and the server's are two wishes: the first is a bound on TPOT, the second on how much all
answers together get. They are met by different layouts, so nothing here turns one into the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labkit.said import say

PERCENTILES = ("mean", "p50", "p95", "p99")
METRICS = ("ttft", "tpot", "answer_tokens", "server_tokens")
SPELLED = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "answer_tokens": say("one answer's tokens/s"),
    "server_tokens": say("the server's tokens/s"),
}


@dataclass(frozen=True)
class PlanObjective:
    """None: not asked. The latencies are judged at `percentile`."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    answer_tokens_per_s: float | None = None
    """Of one answer, once it streams: at the median TPOT."""
    server_tokens_per_s: float | None = None
    """Output tokens of all answers together."""
    percentile: str = "p95"

    def __post_init__(self) -> None:
        wishes = {"--ttft-p95-ms": self.ttft_ms, "--tpot-p95-ms": self.tpot_ms}
        wishes |= {
            "--answer-tokens-per-s": self.answer_tokens_per_s,
            "--server-tokens-per-s": self.server_tokens_per_s,
        }
        for name, value in wishes.items():
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value:g}: give a number above 0, or leave it out.")
        if self.percentile not in PERCENTILES:
            raise ValueError(f"Percentile {self.percentile!r} is not kept: choose one of {', '.join(PERCENTILES)}.")

    @property
    def asks_nothing(self) -> bool:
        return not self.limits()

    def limits(self) -> dict[str, float]:
        """Metric → limit, of what is asked: ms for the latencies, tokens per second for the others."""
        values = (self.ttft_ms, self.tpot_ms, self.answer_tokens_per_s, self.server_tokens_per_s)
        return {name: value for name, value in zip(METRICS, values, strict=True) if value is not None}

    def to_dict(self) -> dict[str, Any]:
        return {
            "ttft_ms": self.ttft_ms,
            "tpot_ms": self.tpot_ms,
            "answer_tokens_per_s": self.answer_tokens_per_s,
            "server_tokens_per_s": self.server_tokens_per_s,
            "percentile": self.percentile,
        }

    def __str__(self) -> str:
        said = [f"{self.name(metric)} {phrase(metric, limit)}" for metric, limit in self.limits().items()]
        return ", ".join(said) or "no objective"

    def name(self, metric: str) -> str:
        if metric not in ("ttft", "tpot"):
            return SPELLED[metric]
        return say("{metric} {percentile}", metric=SPELLED[metric], percentile=self.percentile)


@dataclass(frozen=True)
class Outcome:
    """One wish held against a figure. `band`: relative error that the figure is known to have; 0 where measured."""

    metric: str
    name: str
    value: float
    limit: float
    band: float = 0.0

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.is_rate else self.value <= self.limit

    @property
    def is_rate(self) -> bool:
        return self.metric.endswith("tokens")

    @property
    def sure(self) -> bool:
        """Whether it would come out the same with the whole band against it."""
        worse, better = self.value * (1 + self.band), self.value * (1 - self.band)
        if self.met:
            return better >= self.limit if self.is_rate else worse <= self.limit
        return worse < self.limit if self.is_rate else better > self.limit

    @property
    def ratio(self) -> float:
        """How far it is from its limit: 1 at the limit, above it missed by that factor."""
        if not self.value:
            return math.inf if self.is_rate else 0.0
        return self.limit / self.value if self.is_rate else self.value / self.limit

    @property
    def sentence(self) -> str:
        value, limit = amount(self.metric, self.value), phrase(self.metric, self.limit)
        if self.met:
            return say("{name} {value} meets {limit}", name=self.name, value=value, limit=limit)
        return say("{name} {value} misses {limit}", name=self.name, value=value, limit=limit)

    def __str__(self) -> str:
        return str(self.sentence)

    def to_dict(self) -> dict[str, Any]:
        value = self.value if math.isfinite(self.value) else None
        return {"metric": self.metric, "name": self.name, "value": value, "limit": self.limit, "band": self.band,
                "met": self.met, "sure": self.sure}  # fmt: skip


def judge(
    objective: PlanObjective,
    ttft_ms: Mapping[str, float | None],
    tpot_ms: Mapping[str, float | None],
    tokens_per_s: float | None,
    *,
    band_ttft: float = 0.0,
    band_tpot: float = 0.0,
) -> list[Outcome]:
    """Every wish that there is a figure for, in the order of METRICS."""
    q, median = objective.percentile, tpot_ms.get("p50") or tpot_ms.get("mean")
    figures = {
        "ttft": (ttft_ms.get(q), band_ttft),
        "tpot": (tpot_ms.get(q), band_tpot),
        "answer_tokens": (1e3 / median if median else None, band_tpot),
        "server_tokens": (tokens_per_s, band_tpot),
    }
    return [
        Outcome(metric, objective.name(metric), value, limit, band)
        for metric, limit in objective.limits().items()
        for value, band in [figures[metric]]
        if value is not None
    ]


def amount(metric: str, value: float) -> str:
    if not math.isfinite(value):
        return say("without bound")
    return say("{n:,.0f} tokens/s", n=value) if metric.endswith("tokens") else spoken_ms(value)


def phrase(metric: str, limit: float) -> str:
    if metric.endswith("tokens"):
        return say("at least {amount}", amount=amount(metric, limit))
    return say("at most {amount}", amount=amount(metric, limit))


def spoken_ms(value: float) -> str:
    """Milliseconds as people read them: 8.4 ms, 640 ms, 12.3 s."""
    if value >= 10_000:
        return f"{value / 1e3:,.1f} s"
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"
