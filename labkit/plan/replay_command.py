"""`labkit replay`: a recorded run of a real engine, simulated, and both side by side."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from labkit.plan.shell import sentences
from labkit.plan.strict_json import json_line


def register(app: typer.Typer) -> None:
    app.command()(replay)


def replay(
    requests: Annotated[str, typer.Argument(help="REQUESTS.jsonl: a row of instants for each request.")],
    meta: Annotated[str, typer.Argument(help="META.json: model, engine settings, KV blocks.")],
    gpus: Annotated[str, typer.Option(help="2xh100 …, where the meta file does not tell or to try others.")] = "",
    engine: Annotated[str, typer.Option(help="Whose efficiency: vllm, sglang, trtllm or labkit.")] = "vllm",
    as_json: Annotated[bool, typer.Option("--json", help="Nothing on stdout but one JSON line.")] = False,
) -> None:
    """Simulate a recorded run with its own arrivals and settings; nothing is fitted to it."""
    with sentences():
        from labkit.plan.replay import replay_files

        found = replay_files(requests, meta, gpus, engine)
    if as_json:
        typer.echo(json_line(found))
    else:
        _show(found)


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{found['model']} · {found['layout']} on {found['gpus']} · {found['requests']} requests")
    for name in ("ms", "real", "predicted", "error"):
        table.add_column(name, justify="right")
    for metric in ("ttft_ms", "tpot_ms", "e2e_ms"):
        for key in ("mean", "p50", "p95", "p99"):
            real, guess = found["real"][metric][key], found["predicted"][metric][key]
            title = f"{metric.removesuffix('_ms').upper()} {key}"
            error = found["error"][metric].get(key)  # none where nothing was measured: answers of one token
            table.add_row(title, f"{real:,.1f}", f"{guess:,.1f}", "–" if error is None else f"{error:+.1%}")
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"{found['kv_blocks']:,} KV blocks ({found['kv_blocks_from']}), {found['preemptions']} preemptions, "
        f"{found['queue_peak']} in the queue at most"
    )
