"""What a production engine says of itself beside a run: requests waiting and running, KV in use, preemptions.

Engines tell it on `/metrics` in Prometheus' text form. One reading a while is taken on a thread of its own; gauges come
down to mean and maximum, counters to what the run added. Replicas (the label `engine` or `dp_rank`) are added up, but
of the KV cache the fullest counts, since that is the one which preempts.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

INTERVAL_S = 0.5
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{.*\})?\s+(\S+)")
_GAUGES: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm": {
        "waiting": ("vllm:num_requests_waiting",),
        "running": ("vllm:num_requests_running",),
        "kv_use": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    },
    "sglang": {
        "waiting": ("sglang:num_queue_reqs",),
        "running": ("sglang:num_running_reqs",),
        "kv_use": ("sglang:token_usage",),
    },
}
_COUNTERS: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm": {
        "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
        "prompt_tokens": ("vllm:prompt_tokens_total",),
        "generation_tokens": ("vllm:generation_tokens_total",),
        "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_queries"),
        "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_hits"),
    },
    "sglang": {
        "preemptions": ("sglang:num_retracted_requests_total", "sglang:num_retracted_reqs_total"),
        "prompt_tokens": ("sglang:prompt_tokens_total",),
        "generation_tokens": ("sglang:generation_tokens_total",),
        "prefix_hits": ("sglang:cached_tokens_total",),
    },
}
Families = dict[str, list[float]]


def parse_metrics(text: str) -> Families:
    """Each sample's name, with its values over all label sets, in the order of the page. Lines of no sense are left."""
    found: Families = {}
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.match(line)
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        found.setdefault(match[1], []).append(value)
    return found


def read_figures(engine: str, families: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The figures that the page has, by our names; what it lacks is left out."""
    figures: dict[str, float] = {}
    for name, spellings in {**_GAUGES[engine], **_COUNTERS[engine]}.items():
        values = next((families[spelling] for spelling in spellings if spelling in families), None)
        if values:
            figures[name] = max(values) if name == "kv_use" else float(sum(values))
    return figures


@dataclass
class EngineMetrics:
    """Readings of one run, and what they come down to."""

    engine: str
    readings: list[dict[str, float]] = field(default_factory=list)
    num_missed: int = 0
    """Times that the server did not answer with its metrics."""

    def add(self, text: str) -> None:
        figures = read_figures(self.engine, parse_metrics(text))
        if figures:
            self.readings.append(figures)
        else:
            self.num_missed += 1

    def summary(self) -> dict[str, Any]:
        """{num_samples, num_missed, waiting, running, kv_use: {mean, max}, preemptions, …}; absent figures are None."""
        gauges = {name: self._gauge(name) for name in _GAUGES[self.engine]}
        counters = {name: self._added(name) for name in _COUNTERS[self.engine]}
        return {"num_samples": len(self.readings), "num_missed": self.num_missed, **gauges, **counters}

    def _values(self, name: str) -> list[float]:
        return [reading[name] for reading in self.readings if name in reading]

    def _gauge(self, name: str) -> dict[str, float] | None:
        values = self._values(name)
        return {"mean": float(np.mean(values)), "max": max(values)} if values else None

    def _added(self, name: str) -> float | None:
        """From the first reading to the last. A counter without one label set yet is not on the page: 0 until then."""
        values = [reading.get(name, 0.0) for reading in self.readings]
        return values[-1] - values[0] if values and name in self.readings[-1] else None


class Sampler:
    """Reads the metrics every `INTERVAL_S` while the `with` lasts, once at each end included."""

    def __init__(self, engine: str, fetch: Callable[[], str], interval_s: float = INTERVAL_S) -> None:
        self.metrics = EngineMetrics(engine)
        self._fetch, self._interval_s = fetch, interval_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True, name="labkit-engine-metrics")

    def __enter__(self) -> Sampler:
        self._take()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._take()

    def _sample(self) -> None:
        due_s = time.monotonic()
        while True:
            due_s += self._interval_s
            if self._over.wait(max(0.0, due_s - time.monotonic())):
                return
            self._take()

    def _take(self) -> None:
        try:
            text = self._fetch()
        except OSError:
            self.metrics.num_missed += 1
        else:
            self.metrics.add(text)
