"""`labkit plan`: model, GPUs, traffic and wishes in; the layout, the walk to it, its checks and its commands out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labkit.plan.shell import sentences
from labkit.plan.strict_json import json_line

if TYPE_CHECKING:
    from labkit.layout import AnyLayout
    from labkit.plan.advise import Advice
    from labkit.plan.demand import Demand
    from labkit.plan.diagnose import Diagnosis
    from labkit.plan.objective import PlanObjective
    from labkit.plan.stored import PlannedFrom

ENGINES = ("vllm", "sglang", "trtllm", "labkit")


def register(app: typer.Typer) -> None:
    app.command()(plan)


def plan(
    model: Annotated[str, typer.Option(help="A name under data/models, a folder, or a config.json.")] = "",
    gpus: Annotated[str, typer.Option(help="8xh200, 4xa100-pairs, 2xrtx4090, here, or a TOML file; all nodes'.")] = "",
    nodes: Annotated[int, typer.Option(help="On how many nodes they stand.")] = 1,
    workload: Annotated[str, typer.Option(help="A name, a TOML file, a trace, or 8192/1024 (tokens in/out).")] = "",
    ttft_p95_ms: Annotated[float | None, typer.Option("--ttft-p95-ms", help="Time to the first token.")] = None,
    tpot_p95_ms: Annotated[float | None, typer.Option("--tpot-p95-ms", help="Time per token after it.")] = None,
    answer_tokens_per_s: Annotated[float | None, typer.Option(help="One answer's: asked apart from …")] = None,
    server_tokens_per_s: Annotated[float | None, typer.Option(help="… the server's, all answers together.")] = None,
    percentile: Annotated[str, typer.Option(help="At which the latencies are judged: p50, p95, p99, mean.")] = "p95",
    rate: Annotated[float | None, typer.Option(help="Requests per second; by default the workload's own.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Instead: a closed loop of so many in flight.")] = None,
    length_scale: Annotated[float, typer.Option(help="Multiply the workload's lengths (ours are a tenth).")] = 1.0,
    engine: Annotated[str, typer.Option(help="vllm, sglang, trtllm or labkit.")] = "vllm",
    price: Annotated[float | None, typer.Option(help="$ per GPU and hour.")] = None,
    run: Annotated[str, typer.Option(help="A stored run, or last: diagnosed, its load and layout taken.")] = "",
    layout: Annotated[
        str, typer.Option(help="What serves now: tp2, or prefill:tp2,decode:tp2; by default nothing (or the run's).")
    ] = "",
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences in a step, as the engine is set.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens in a step.")] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, or fp8: one byte a number.")] = "",
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="Share of the GPU that it may take.")] = None,
    prefix_cache: Annotated[bool, typer.Option(help="Whether the engine reuses shared prefixes.")] = True,
    verify: Annotated[bool, typer.Option(help="Let the simulator look at the outcome.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Nothing on stdout but one JSON line.")] = False,
) -> None:
    """The smallest layout that does it: why, how sure, what to check, how to run it, and why not the others."""
    with sentences():
        from labkit.plan.objective import PlanObjective

        objective = PlanObjective(ttft_p95_ms, tpot_p95_ms, answer_tokens_per_s, server_tokens_per_s, percentile)
        given = Given(model, gpus, nodes, workload, rate, concurrency, length_scale, engine, price, run, layout, verify)
        settings = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens,
                    "kv_cache_dtype": kv_cache_dtype or None, "gpu_memory_utilization": gpu_memory_utilization,
                    "enable_prefix_caching": None if prefix_cache else False}  # fmt: skip
        found = given.advise(objective, {name: value for name, value in settings.items() if value is not None})
    if as_json:
        typer.echo(json_line(found.to_json()))
        return
    from rich.console import Console

    from labkit.plan.plan_text import plan_view

    Console(highlight=False).print(plan_view(found))


@dataclass(frozen=True)
class Given:
    """The command line, and what it is read as."""

    model: str
    gpus: str
    nodes: int
    workload: str
    rate: float | None
    concurrency: int | None
    length_scale: float
    engine: str
    price: float | None
    run: str
    layout: str
    verify: bool

    def advise(self, objective: PlanObjective, settings: dict[str, Any]) -> Advice:
        """Raises ValueError, KeyError or FileNotFoundError with a sentence."""
        from labkit.model.spec import load_spec
        from labkit.plan.advise import advise
        from labkit.plan.hardware import load_hardware

        self._check()
        stored = self._stored()
        model = self.model or (stored.summary.get("model") if stored else "") or ""
        if not model:
            raise ValueError("Which model? Give --model NAME, a folder, or the path of a config.json.")
        if not self.gpus:
            raise ValueError("On which GPUs? Give --gpus, such as 8xh200, 4xa100-pairs or here.")
        spec, demand, engine = load_spec(model), self._demand(stored), self._settings(stored, settings)
        longest = min(engine.max_model_len or spec.max_positions, spec.max_positions)
        if demand.longest_tokens > longest:
            raise ValueError(
                f"The longest request has {demand.longest_tokens:,} tokens, and {spec.name} takes {longest:,}: shorten "
                "requests (--length-scale), or choose a model with a longer context."
            )
        return advise(
            spec, load_hardware(self.gpus, self.nodes), demand, objective, engine,
            engine=self.engine, price=self.price, current=self._current(stored),
            diagnosis=_diagnosed(stored, objective), expert_load=stored.expert_load() if stored else (),
            verify=self.verify, asked=self.workload,
        )  # fmt: skip

    def _check(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"--engine {self.engine} is not known: choose one of {', '.join(ENGINES)}.")
        if self.price is not None and not 0 < self.price < math.inf:
            raise ValueError(f"--price is {self.price:g}: $ per GPU and hour, above 0.")
        if self.nodes < 1:
            raise ValueError(f"--nodes is {self.nodes}: at least 1.")
        if not self.workload and not self.run:
            raise ValueError("Which traffic? Give --workload (a name, a file, or 8192/1024), or --run of a stored run.")

    def _stored(self) -> PlannedFrom | None:
        from labkit.plan.stored import PlannedFrom

        return PlannedFrom.load(self.run) if self.run else None

    def _demand(self, stored: PlannedFrom | None) -> Demand:
        from labkit.plan.demand import read_demand

        if self.workload:
            return read_demand(self.workload, rate=self.rate, concurrency=self.concurrency,
                               length_scale=self.length_scale)  # fmt: skip
        assert stored is not None
        return stored.demand()

    def _settings(self, stored: PlannedFrom | None, changed: dict[str, Any]) -> Any:
        from dataclasses import replace

        from labkit.plan.work import EngineSettings

        usual = EngineSettings(policy="labkit" if self.engine == "labkit" else "vllm")
        return replace(stored.settings() if stored else usual, **changed)

    def _current(self, stored: PlannedFrom | None) -> AnyLayout | None:
        from labkit.layout import read_layout

        if self.layout:
            return read_layout(self.layout)
        return stored.layout() if stored else None


def _diagnosed(stored: PlannedFrom | None, objective: PlanObjective) -> Diagnosis | None:
    from labkit.plan.diagnose import diagnose

    if stored is None:
        return None
    return diagnose(stored.summary, objective, run=stored)


