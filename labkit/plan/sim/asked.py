"""`labkit simulate` as one value: model, GPUs, layout and load in words, and the simulation that they ask for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from labkit.layout import AnyLayout, read_layout
from labkit.measure.metrics import Objective
from labkit.model.shapes import ModelSpec
from labkit.model.spec import load_spec
from labkit.plan.experiment import num_requests, served
from labkit.plan.hardware import load_hardware
from labkit.plan.memory import MemoryPlan, memory_on
from labkit.plan.sim.load import trace_requests, workload_requests
from labkit.plan.sim.request import SimRequest
from labkit.plan.sim.result import SimResult
from labkit.plan.work import EngineSettings

_UNBOUNDED = 10**9
LEAST, MOST = 1e-6, 1e9
MOST_REQUESTS = 5_000_000
"""Five times what benchmarks/simulator_speed.py runs: all are drawn, and kept, before the first arrives."""


@dataclass(frozen=True)
class Asked:
    """Bad words are told by the rooms that read them, each in a sentence."""

    model: str
    gpus: str
    layout: str
    workload: str = ""
    trace: str = ""
    rate: float | None = None
    concurrency: int = 0
    num_requests: int | None = None
    seconds: float | None = None
    seed: int = 0
    length_scale: float = 1.0
    time_scale: float = 1.0
    nodes: int = 1
    engine: str = "vllm"
    routing: str = "least-work"
    ahead: bool | None = None
    """None: as the engine does it (vLLM plans ahead, except with pipeline stages here)."""
    kv_blocks: int = 0
    settings: EngineSettings = EngineSettings()
    objective: Objective = Objective()

    def run(self, on_progress: Callable[[int], None] | None = None) -> tuple[SimResult, dict[str, Any]]:
        """The result, and its summary with what was asked. Raises ValueError, FileNotFoundError with a sentence."""
        self._check()
        spec, hardware, layout = load_spec(self.model), load_hardware(self.gpus, self.nodes), read_layout(self.layout)
        if layout.world_size > hardware.num_gpus:
            raise ValueError(f"{layout} needs {layout.world_size} GPUs, and {self.gpus} has {hardware.num_gpus}.")
        memory = memory_on(layout, spec, hardware, self.settings)
        if not memory.fits and not self.kv_blocks:
            raise ValueError(memory.reason)
        requests = self.requests(spec, layout)
        result = served(
            requests, layout, spec, hardware, self.settings, self.engine, concurrency=self.concurrency,
            kv_blocks=self.kv_blocks, routing=self.routing, ahead=self.ahead, seed=self.seed, on_progress=on_progress,
        )  # fmt: skip
        if result.refused and not result.done.any():
            why = next(iter(result.refused.values()))
            raise ValueError(f"None of the {len(requests):,} requests can be served: {why}")
        return result, self._summary(result, layout, memory) | {
            "shortened": self._shortened(requests, spec, layout)
        }

    def _check(self) -> None:
        counts = {"rate": self.rate, "seconds": self.seconds, "num-requests": self.num_requests,
                  "length-scale": self.length_scale, "time-scale": self.time_scale}  # fmt: skip
        for name, value in counts.items():
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"--{name} is {value:g}: give a number above 0, or leave it out.")
            if value is not None and not LEAST <= value <= MOST:
                raise ValueError(f"--{name} is {value:g}: give a number from {LEAST:g} to {MOST:g}, or leave it out.")
        count = 0 if self.trace else self.num_requests or (self.seconds or 0) * (self.rate or 0)
        if count > MOST_REQUESTS:
            raise ValueError(
                f"{count:,.0f} requests are asked for, and {MOST_REQUESTS:,} are the most that one simulation takes: "
                "percentiles settle with thousands; give fewer (--num-requests), or fewer --seconds."
            )
        for name, value in {"concurrency": self.concurrency, "seed": self.seed, "kv-blocks": self.kv_blocks}.items():
            if value < 0:
                raise ValueError(f"--{name} is {value}: give a whole number from 0 on.")
        if self.concurrency and self.rate is not None:
            raise ValueError("Give --rate or --concurrency, not both: an open loop has a rate, a closed one a number.")
        if self.workload and not self.trace:
            if self.seconds is not None and self.rate is None:
                raise ValueError("--seconds of a workload needs --rate with it; or say how many with --num-requests.")
            if self.time_scale != 1:
                raise ValueError("--time-scale is the speed of a trace; a workload comes faster with --rate.")

    def requests(self, spec: ModelSpec, layout: AnyLayout) -> list[SimRequest]:
        longest = self._longest(spec)
        if bool(self.trace) == bool(self.workload):
            raise ValueError("Give a workload or a trace, one of them: --workload chat, or --trace FILE.")
        if self.trace:
            return trace_requests(
                self.trace, num_requests=self.num_requests, rate=self.rate, seconds=self.seconds,
                length_scale=self.length_scale, time_scale=self.time_scale, max_context=longest,
            )  # fmt: skip
        number = self.num_requests
        if number is None and self.seconds is not None and self.rate is not None:
            number = max(1, round(self.seconds * self.rate))
        if number is None and self.concurrency:
            number = num_requests(layout, self.concurrency)
        return workload_requests(
            self.workload, num_requests=number, rate=self.rate, seed=self.seed, length_scale=self.length_scale,
            max_context=longest,
        )  # fmt: skip

    def _shortened(self, requests: list[SimRequest], spec: ModelSpec, layout: AnyLayout) -> int:
        """Requests that are longer than the model takes and were cut to it."""
        if max(r.prompt_tokens + r.output_tokens for r in requests) < self._longest(spec):
            return 0
        whole = replace(self, settings=replace(self.settings, max_model_len=_UNBOUNDED)).requests(spec, layout)
        return sum(r.prompt_tokens + r.output_tokens > self._longest(spec) for r in whole)

    def _longest(self, spec: ModelSpec) -> int:
        return self.settings.max_model_len or spec.max_positions

    def _summary(self, result: SimResult, layout: AnyLayout, memory: MemoryPlan) -> dict[str, Any]:
        return {
            "source": "predicted",
            "model": self.model,
            "gpus": self.gpus,
            "layout": layout.slug,
            "workload": self.workload or self.trace,
            "rate": self.rate,
            "concurrency": self.concurrency,
            "engine": self.engine,
            "policy": self.settings.policy,
            "routing": self.routing,
            "kv_blocks": self.kv_blocks or memory.kv_blocks,
            "block_size": self.settings.block_size,
            **result.summary(self.objective, result.steady(whole=bool(self.trace))),
            "over_time": result.over_time(),
        }
