"""`vllm bench serve` as a client beside ours: given the same prompts, letter for letter, and the same arrivals.

Our client's prompts of a run are written as the file of a custom data set, so that both send the same strings. A load
is a closed loop of so many, or arrivals at equal distances, which either client keeps without a draw of its own.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.cluster.engines import fetch
from labkit.load.driver import DriverProcess
from labkit.load.engine_metrics import parse_metrics
from labkit.load.lengths import Lengths
from labkit.load.report import LoadReport
from labkit.load.spec import RunSpec, schedule_of
from labkit.load.target import Dialect, RequestWriter
from labkit.load.workload import Arrival, Part, Workload
from labkit.measure.metrics import tpot_ms, ttft_ms

_READY, _SENDS = "Starting initial single prompt test run", "Starting main benchmark run"
"""What vLLM's client prints once its imports are done, and just before it sends the load."""
Figures = NDArray[np.float64]
"""Shape (2, requests), ms: TTFT and TPOT of each request in the order of the schedule."""


def noop() -> None:
    return


@dataclass(frozen=True)
class Load:
    """A closed loop of `concurrency`, or `rate` requests per second at equal distances."""

    concurrency: int = 0
    rate: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Load:
        return cls(rate=float(text.removesuffix("/s"))) if text.endswith("/s") else cls(concurrency=int(text))

    def __str__(self) -> str:
        return f"{self.rate:g}/s" if self.rate else f"x {self.concurrency}"

    def words(self) -> list[str]:
        """For vLLM's client."""
        if self.concurrency:
            return ["--max-concurrency", str(self.concurrency)]
        return ["--request-rate", str(self.rate), "--burstiness", "inf"]

    def spec(self, num_requests: int, prompt_tokens: int, output_tokens: int, **more: Any) -> RunSpec:
        """For ours: constant lengths."""
        lengths = (Lengths("constant", tokens=tokens) for tokens in (prompt_tokens, output_tokens))
        arrival = Arrival(process="constant", rate=self.rate or 1.0)
        workload = Workload(name="pair", title="two clients", parts=(Part(*lengths),), arrival=arrival)
        return RunSpec(
            workload=workload, num_requests=num_requests, concurrency=self.concurrency, rate=self.rate or None, **more
        )


def ours(driver: DriverProcess, spec: RunSpec, meanwhile: Callable[[], None] = noop) -> tuple[LoadReport, Figures]:
    """Raises SystemExit where a request failed or answered another length than was asked. meanwhile: as it begins."""
    report = driver.start(spec, on_start=lambda _: meanwhile()).wait()
    if bad := [row for row in report.records if row.status != "completed" or row.n != row.asked_output_tokens]:
        raise SystemExit(f"{len(bad)} of {len(report.records)} requests went wrong: {bad[0].error or bad[0]}")
    rows = [(ttft_ms(row) or 0.0, tpot_ms(row) or 0.0) for row in report.records]
    return report, np.array(rows, np.float64).T


@dataclass(frozen=True)
class VllmClient:
    """Where vLLM's program and the model's tokenizer are. `beside`: the process whose place in line it gets."""

    program: str
    tokenizer: str
    beside: int | None = None

    def run(
        self, spec: RunSpec, load: Load, dialect: Mapping[str, Any], result: Path, meanwhile: Callable[[], None] = noop
    ) -> tuple[dict, Figures]:
        """Its own result file, and each request's figures from it. SystemExit with its last words when it fails.

        meanwhile: called as it begins to send.
        """
        prompts = result.with_suffix(".prompts.jsonl")
        prompts.write_text("".join(json.dumps(row) + "\n" for row in prompts_of(spec, dialect)))
        command = [
            self.program, "bench", "serve", "--base-url", spec.target.url, "--endpoint", "/v1/completions",
            "--model", spec.target.model, "--tokenizer", self.tokenizer, "--dataset-name", "custom",
            "--dataset-path", str(prompts), "--skip-chat-template", "--disable-shuffle", "--custom-output-len", "-1",
            "--num-prompts", str(spec.num_requests), *load.words(), "--ignore-eos", "--temperature", "0",
            "--disable-tqdm", "--save-result", "--save-detailed", "--result-filename", str(result),
        ]  # fmt: skip
        said = self._watched(command, meanwhile)
        if not result.exists():
            raise SystemExit(f"vllm bench serve left no result:\n{said[-2500:]}")
        found = json.loads(result.read_text())
        if found["failed"]:
            raise SystemExit(f"{found['failed']} requests of vllm bench serve failed: {found['errors'][:1]}")
        return found, figures_of(found)

    def _watched(self, command: list[str], meanwhile: Callable[[], None]) -> str:
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1"}
        said = []
        with subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                said.append(line)
                if self.beside is not None and line.startswith(_READY):
                    _schedule_alike(process.pid, self.beside)
                if line.startswith(_SENDS):
                    meanwhile()
        return "".join(said)


def _schedule_alike(pid: int, other: int) -> None:
    """Gives a process another's priority; only from when it sends, since its imports would keep everybody waiting."""
    os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, other))
    if hasattr(os, "sched_setscheduler"):
        os.sched_setscheduler(pid, os.sched_getscheduler(other), os.sched_getparam(other))


def prompts_of(spec: RunSpec, dialect: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The texts that our client sends for `spec`. dialect: the options that it reports of this server."""
    options = {**dialect, "overhead_tokens": int(dialect.get("overhead_tokens", 0))}
    writer = RequestWriter(spec.target, spec.run_id, spec.target.model, Dialect(**options))
    return [
        {"prompt": writer.text(request.prompt_ids), "output_tokens": request.max_tokens}
        for request in schedule_of(spec).requests
    ]


def figures_of(found: Mapping[str, Any]) -> Figures:
    """TTFT from the send, and TPOT as it defines it; they must come to the medians that it printed."""
    ttfts, latencies, lengths = (np.array(found[name]) for name in ("ttfts", "latencies", "output_lens"))
    rows = np.array([ttfts, (latencies - ttfts) / (lengths - 1)]) * 1e3
    for name, values in zip(("ttft", "tpot"), rows, strict=True):
        if abs(statistics.median(values) - found[f"median_{name}_ms"]) > 1e-6:
            raise SystemExit(f"median {name}: {statistics.median(values)} of {found[f'median_{name}_ms']} told.")
    return rows


class ServerSide:
    """What a vLLM server says itself of the requests between two looks: mean TTFT and TPOT, from its /metrics."""

    _NAMES = ("vllm:time_to_first_token_seconds", "vllm:request_time_per_output_token_seconds")

    def __init__(self, url: str) -> None:
        self._url = url
        self._before = self._sums()

    def look(self) -> None:
        """From now on."""
        self._before = self._sums()

    def off(self, figures: Figures) -> Figures:
        """Shape (2), ms: a client's means minus the server's, whose TTFT runs from the request's arrival there."""
        total, count = (self._sums() - self._before).reshape(2, 2).T
        return figures.mean(axis=1) - total / np.maximum(count, 1) * 1e3

    def _sums(self) -> Figures:
        page = parse_metrics(fetch(f"{self._url}/metrics"))
        return np.array([sum(page.get(f"{name}_{part}", [0.0])) for name in self._NAMES for part in ("sum", "count")])
