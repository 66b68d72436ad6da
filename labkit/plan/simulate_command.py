"""`labkit simulate`: what a layout would do with a load, on GPUs that need not be here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labkit.plan.shell import sentences
from labkit.plan.strict_json import json_line

if TYPE_CHECKING:
    from labkit.plan.sim.asked import Asked

BARS = " ▁▂▃▄▅▆▇█"
_COLUMNS = 60


def register(app: typer.Typer) -> None:
    app.command()(simulate)


def simulate(
    model: Annotated[str, typer.Option(help="A name under data/models, a folder, or a config.json.")],
    gpus: Annotated[str, typer.Option(help="8xh200, 4xa100-pairs, 2xrtx4090, here, or a TOML file.")],
    layout: Annotated[str, typer.Option(help="tp4, dp2xtp2, pp2xtp2, prefill:tp2,decode:tp2 …")],
    workload: Annotated[str, typer.Option(help="A name, a TOML file, or 8192/1024 (tokens in/out).")] = "",
    trace: Annotated[str, typer.Option(help="A public trace instead (Azure, BurstGPT, Mooncake).")] = "",
    rate: Annotated[float | None, typer.Option(help="Requests per second; by default the load's own.")] = None,
    concurrency: Annotated[int, typer.Option(help="Closed loop with so many requests in flight.")] = 0,
    num_requests: Annotated[int | None, typer.Option(help="How many; by default enough, or the whole trace.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Of the trace, or with --rate of the workload.")] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals and lengths.")] = 0,
    length_scale: Annotated[float, typer.Option(help="Multiply every length by this.")] = 1.0,
    time_scale: Annotated[float, typer.Option(help="Speed of the trace.")] = 1.0,
    nodes: Annotated[int, typer.Option(help="On how many nodes the GPUs stand.")] = 1,
    engine: Annotated[str, typer.Option(help="Whose efficiency: vllm, sglang, trtllm or labkit.")] = "vllm",
    policy: Annotated[str, typer.Option(help="Admission: vllm or labkit; by default the engine's.")] = "",
    routing: Annotated[str, typer.Option(help="least-work, round-robin, prefix or least-requests.")] = "least-work",
    plan_ahead: Annotated[
        bool | None, typer.Option(help="Async scheduling; by default with policy vllm.")
    ] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens in a step.")] = 8192,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences of a replica at once.")] = 256,
    block_size: Annotated[int, typer.Option(help="Tokens in a KV block.")] = 16,
    max_model_len: Annotated[int | None, typer.Option(help="Longest request; by default the model's.")] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the GPU that it may take.")] = 0.9,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, or fp8: one byte a number.")] = "auto",
    kv_blocks: Annotated[int, typer.Option(help="KV blocks of a replica; 0: as its memory leaves.")] = 0,
    prefix_cache: Annotated[bool, typer.Option(help="Whether shared prefixes are reused.")] = True,
    objective: Annotated[str, typer.Option(help="What counts as good, in ms: ttft=1000,tpot=50.")] = "",
    ttft_p95_ms: Annotated[float | None, typer.Option("--ttft-p95-ms", help="The same, one by one.")] = None,
    tpot_p95_ms: Annotated[float | None, typer.Option("--tpot-p95-ms", help="The same, one by one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Nothing on stdout but one JSON line.")] = False,
) -> None:
    """Simulate a load on a layout: percentiles, goodput, the queue and the KV cache as they go."""
    with sentences():
        from labkit.measure.metrics import Objective
        from labkit.plan.sim.asked import Asked
        from labkit.plan.work import EngineSettings

        settings = EngineSettings(
            policy or ("labkit" if engine == "labkit" else "vllm"), max_num_batched_tokens, max_num_seqs, block_size,
            gpu_memory_utilization, max_model_len, kv_cache_dtype, prefix_cache,
        )  # fmt: skip
        good = Objective.parse(objective)
        good = Objective(
            good.ttft_ms if ttft_p95_ms is None else ttft_p95_ms, good.tpot_ms if tpot_p95_ms is None else tpot_p95_ms
        )
        asked = Asked(
            model, gpus, layout, workload, trace, rate, concurrency, num_requests, seconds, seed, length_scale,
            time_scale, nodes, engine, routing, plan_ahead, kv_blocks, settings, good,
        )  # fmt: skip
        summary = _run(asked, as_json)
    if as_json:
        typer.echo(json_line(summary))
    else:
        _show(summary)


def _run(asked: Asked, as_json: bool) -> dict[str, Any]:
    with _progress(as_json) as tell:
        return asked.run(tell)[1]


@contextlib.contextmanager
def _progress(as_json: bool) -> Iterator[Callable[[int], None] | None]:
    """A line that counts, where somebody can see it."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if as_json or not console.is_terminal:
        yield None
        return
    with console.status("Simulating …") as status:
        yield lambda num: status.update(f"Simulating … {num:,} requests answered")


def bar(values: list[float], most: float, columns: int = _COLUMNS) -> str:
    """Values over time as one line of blocks, each column the largest of its span."""
    if not values or most <= 0:
        return ""
    columns = min(columns, len(values))
    spans = [values[i * len(values) // columns : (i + 1) * len(values) // columns] for i in range(columns)]
    return "".join(BARS[min(8, round(max(span) / most * 8))] for span in spans)


def _left_out(summary: dict[str, Any]) -> str:
    if summary["concurrency"]:
        return "neither the first of each client, on an empty server, nor the last, behind which none followed"
    return "the first fifth came while the server filled"


def _show(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(title=f"{summary['layout']} · {summary['model']} on {summary['gpus']} · predicted")
    for name in ("", "mean", "p50", "p90", "p95", "p99"):
        table.add_column(name, justify="right")
    for name, title in (("ttft", "TTFT ms"), ("tpot", "TPOT ms"), ("e2e", "whole ms"), ("queue", "queue ms")):
        figures = summary[f"{name}_ms"]
        table.add_row(title, *(f"{figures[name]:,.1f}" for name in ("mean", "p50", "p90", "p95", "p99")))
    console.print(table)
    console.print(
        f"{summary['completed']:,} of {summary['requests']:,} requests in {summary['seconds']:,.1f} s: "
        f"{summary['requests_per_s']:.2f} requests/s, {summary['tokens_per_s']:,.0f} tokens/s"
        + (f", good {summary['attainment']:.1%}" if "attainment" in summary else "")
    )
    if summary["counted"] < summary["completed"]:
        console.print(f"Times of {summary['counted']:,} of them: {_left_out(summary)}.")
    if summary["shortened"]:
        console.print(f"{summary['shortened']:,} requests were longer than the model takes, and were cut to it.")
    if summary["refused"]:
        console.print(f"{summary['refused']:,} requests were refused: no replica has room for them.")
    over, queue_peak = summary["over_time"], summary["queue_peak"]
    console.print(f"queue {bar(over['waiting']['values'], max(1.0, queue_peak))} most {queue_peak}")
    console.print(
        f"KV    {bar(over['kv']['values'], 1.0)} most {summary['kv_peak']:.0%} of a replica's "
        f"{summary['kv_blocks']} blocks, {summary['preemptions']} preemptions"
    )
