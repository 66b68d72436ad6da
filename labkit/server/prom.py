"""GET /metrics: vLLM's names with our prefix, so that a dashboard made for the one reads the other after one replace.

Gauges are read off the engine when somebody asks; histograms and counters advance once per finished request, so a
token costs nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TPOT = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_LATENCY = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240)


class _EngineGauges:
    """Asks the engine at scrape time."""

    def __init__(self, replicas: Callable[[], list[dict[str, Any]]]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterable[Metric]:
        running = _gauge("num_requests_running", "Requests in the running batches.")
        waiting = _gauge("num_requests_waiting", "Requests that wait to be scheduled.")
        usage = _gauge("kv_cache_usage_perc", "Share of KV blocks in use; 1 is all of them.")
        for index, replica in enumerate(self._replicas()):
            label = [str(index)]
            running.add_metric(label, replica["running"])
            waiting.add_metric(label, replica["waiting"])
            usage.add_metric(label, replica["kv_used_blocks"] / max(1, replica["kv_total_blocks"]))
        return running, waiting, usage


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"labkit_{name}", text, labels=["engine"])


class Metrics:
    """`observe` takes each finished request's event."""

    def __init__(self, replicas: Callable[[], list[dict[str, Any]]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineGauges(replicas))
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._output = self._counter("generation_tokens", "Generated tokens of finished requests.")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found there.")
        self._preempted = self._counter("num_preemptions", "Preemptions of finished requests.")
        self._success = self._counter("request_success", "Finished requests.", ["finished_reason"])
        self._ttft = self._histogram("time_to_first_token_seconds", "Received to first token.", _TTFT)
        self._tpot = self._histogram("time_per_output_token_seconds", "(last - first) / (n - 1), per request.", _TPOT)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Received to last token.", _LATENCY)

    def _counter(self, name: str, text: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(f"labkit_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"labkit_{name}", text, registry=self._registry, buckets=buckets)

    def observe(self, times: dict[str, Any]) -> None:
        """`times`: the fields of ServerTimes."""
        num_output = times["output_tokens"]
        self._prompt.inc(times["prompt_tokens"])
        self._queries.inc(times["prompt_tokens"])
        self._hits.inc(times["cached_tokens"])
        self._output.inc(num_output)
        self._preempted.inc(times["num_preemptions"])
        self._success.labels(times["finish_reason"]).inc()
        if num_output:
            self._ttft.observe((times["first_end_ns"] - times["received_ns"]) / 1e9)
            self._e2e.observe((times["last_end_ns"] - times["received_ns"]) / 1e9)
        if num_output > 1:
            span_ns = times["last_end_ns"] - times["first_end_ns"]
            self._tpot.observe(span_ns / (num_output - 1) / 1e9)

    def text(self) -> bytes:
        return generate_latest(self._registry)
