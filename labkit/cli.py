"""The shell's way in: `labkit run`, `compare`, `layouts`, `runs`, `export`, and the rooms' own commands
beside them.

Nothing heavy is imported until a command needs it. What a script reads is the last line of stdout; with
--json it is the only one. Errors are one sentence on stderr and exit code 2; 1 is a run that failed, 130
one that was stopped.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labkit.lab.shell import read_settings, sentences, token
from labkit.paths import sentence

if TYPE_CHECKING:
    from labkit.lab import Lab
    from labkit.lab.run import Run

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="See, measure and decide how to split LLM inference across GPUs.",
)

_Workload = Annotated[str, typer.Option(help="A name under data/workloads, or a TOML file.")]
_Rate = Annotated[float | None, typer.Option(help="Requests per second; by default the workload's own.")]
_Seconds = Annotated[
    float | None, typer.Option(help="Length of the measured part; by default 30, or until --num-requests.")
]
_Number = Annotated[int | None, typer.Option(help="End after so many requests instead.")]
_Concurrency = Annotated[int, typer.Option(help="Closed loop with so many requests in flight.")]
_Objective = Annotated[str, typer.Option(help="What counts as good, in ms.")]
_Seed = Annotated[int, typer.Option(help="Of arrivals and lengths: same seed, same schedule.")]
_Warmup = Annotated[
    float, typer.Option(help="Seconds before the measured part; -1: a fifth of it, at most 2.")
]
_Set = Annotated[list[str], typer.Option("--set", help="NAME=VALUE of an engine setting; may be repeated.")]
_Scale = Annotated[float, typer.Option(help="Multiply every length by this.")]
_Server = Annotated[str, typer.Option(help="A server's URL, ours or any other; LABKIT_TOKEN is its token.")]
_Model = Annotated[str, typer.Option(help="Model to serve (or, with --server, its name there).")]
_Ranks = Annotated[int, typer.Option(help="Ranks, if a server has to be started; 0: what suits the machine.")]
_Json = Annotated[bool, typer.Option("--json", help="Nothing on stdout but one JSON line.")]


@app.command()
def run(
    layout: Annotated[str, typer.Option(help="tp1, tp2, dp2, dp2xtp2 …; empty: as it is.")] = "",
    workload: _Workload = "chat",
    rate: _Rate = None,
    seconds: _Seconds = None,
    num_requests: _Number = None,
    concurrency: _Concurrency = 0,
    objective: _Objective = "ttft=400,tpot=50",
    seed: _Seed = 0,
    warmup: _Warmup = -1.0,
    setting: _Set = [],  # noqa: B006 (typer copies it)
    length_scale: _Scale = 1.0,
    trace: Annotated[str, typer.Option(help="Replay a public trace (Azure, Mooncake, BurstGPT).")] = "",
    time_scale: Annotated[float, typer.Option(help="Speed of the trace.")] = 1.0,
    server: _Server = "",
    model: _Model = "",
    ranks: _Ranks = 0,
    endpoint: Annotated[str, typer.Option(help="completions or chat, on a foreign server.")] = "completions",
    text: Annotated[
        bool, typer.Option("--text", help="Ask a foreign server in words, not token ids.")
    ] = False,
    engine: Annotated[str, typer.Option(help="Start vllm or sglang for this run, with --layout's flags.")] = "",
    engine_args: Annotated[str, typer.Option(help="Added to its command: '--enforce-eager …'.")] = "",
    engine_python: Annotated[str, typer.Option(help="The Python that has it; else LABKIT_VLLM_PYTHON.")] = "",
    as_json: _Json = False,
) -> None:
    """Send a load and measure it: a live table, a summary, and one JSON line last."""
    options = _load_options(
        workload, rate, seconds, num_requests, concurrency, objective, seed, warmup, length_scale
    )
    options |= {"trace": trace, "time_scale": time_scale}
    asked: dict[str, Any] = {"endpoint": endpoint, "prompt_mode": "text" if text else "ids"}
    with sentences():
        if engine or engine_args or engine_python:
            from labkit.lab.engine_commands import check_options, start_and_run

            check_options(engine, server=server, setting=setting, ranks=ranks)
            done = start_and_run(
                engine, layout, _screen, as_json, model=model, engine_args=engine_args, python=engine_python,
                **asked, **options,
            )  # fmt: skip
        elif (lab := _foreign_or_lab(server, model, ranks, layout)) is None:
            from labkit.lab import run_against

            with _screen(as_json) as show:
                done = run_against(server, model, token=token(), on_update=show, **asked, **options)
        else:
            with lab, _screen(as_json) as show:
                done = lab.run(layout or None, settings=read_settings(setting), on_update=show, **options)
    _report(done, as_json)


@app.command()
def compare(
    layouts: Annotated[list[str], typer.Argument(help="Two or more: tp1 tp2 dp2 …")],
    workload: _Workload = "chat",
    rate: _Rate = None,
    seconds: _Seconds = None,
    num_requests: _Number = None,
    concurrency: _Concurrency = 0,
    objective: _Objective = "ttft=400,tpot=50",
    seed: _Seed = 0,
    warmup: _Warmup = -1.0,
    setting: _Set = [],  # noqa: B006 (typer copies it)
    length_scale: _Scale = 1.0,
    rounds: Annotated[int, typer.Option(help="Runs of each layout, in turn.")] = 1,
    server: _Server = "",
    model: _Model = "",
    ranks: _Ranks = 0,
    as_json: _Json = False,
) -> None:
    """The same schedule on several layouts, side by side, with an interval for every difference."""
    options = _load_options(
        workload, rate, seconds, num_requests, concurrency, objective, seed, warmup, length_scale
    )
    with sentences():
        from labkit.lab.compare import check_layouts
        from labkit.lab.plan import plan_of

        check_layouts(layouts)
        plan = plan_of(settings=read_settings(setting), **options)
        with _lab(server, model, ranks) as lab, _screen(as_json) as show:
            found = lab.compare_plan(layouts, plan, rounds, show)
    if not as_json:
        from labkit.lab import screen

        _console(as_json).print(screen.comparison(found))
    typer.echo(json.dumps(found.to_dict()))


# ---- what the commands share


def _load_options(
    workload: str, rate: float | None, seconds: float | None, num_requests: int | None, concurrency: int,
    objective: str, seed: int, warmup: float, length_scale: float,
) -> dict[str, Any]:  # fmt: skip
    """A warm-up of -1 on the command line is None in Python."""
    return {
        "workload": workload,
        "rate": rate,
        "seconds": seconds,
        "num_requests": num_requests,
        "concurrency": concurrency,
        "objective": objective,
        "seed": seed,
        "warmup_s": None if warmup < 0 else warmup,
        "length_scale": length_scale,
    }


def _lab(server: str, model: str, ranks: int) -> Lab:
    from labkit.lab import connect

    serve: dict[str, Any] = {name: value for name, value in (("model", model), ("ranks", ranks)) if value}
    return connect(server or None, token() or None, **serve)


def _foreign_or_lab(server: str, model: str, ranks: int, layout: str) -> Lab | None:
    """None: the server at that address is not a lab server."""
    lab = _lab(server, "" if server else model, 0 if server else ranks)
    if not server:
        return lab
    from labkit.server.client import ServerError

    try:
        served = lab.state()["model"]
    except (ServerError, ValueError) as error:
        if isinstance(error, ServerError) and error.status in (401, 403):
            raise
        lab.close()
        if layout:
            raise ValueError(
                f"{server} is not a lab server, so its layout cannot be chosen: leave out --layout, or start "
                "one of ours with `labkit serve`."
            ) from error
        return None
    if model and Path(model).name != served:
        lab.close()
        raise ValueError(f"{server} serves {served}, and you asked for {model}: leave out --model, or name that one.")
    return lab


def _console(as_json: bool) -> Any:
    from rich.console import Console

    return Console(stderr=as_json, highlight=False)


@contextlib.contextmanager
def _screen(as_json: bool) -> Iterator[Any]:
    """`on_update` that draws a table which moves; nothing moves where nobody can see it."""
    from rich.live import Live

    from labkit.lab import screen

    console = _console(as_json)
    if not console.is_terminal:
        yield None
        return
    with Live(console=console, transient=True, refresh_per_second=4) as live:
        yield lambda update: live.update(screen.live(update))


def _report(done: Run, as_json: bool) -> None:
    """The summary, how the run ended, and the JSON line."""
    from labkit.lab import screen

    if not as_json:
        _console(as_json).print(screen.summary(done.summary))
    if done.status == "stopped":
        typer.echo(f"Stopped; what was measured is kept as {done.run_id}.", err=True)
    typer.echo(json.dumps(done.summary))
    if done.status != "finished":
        raise typer.Exit(130 if done.status == "stopped" else 1)


def _mount() -> None:
    """Commands of other rooms; one whose file is not there is not missed."""
    rooms = ("lab.cli_commands", "lab.bench_commands", "lab.profile_command", "server.cli_commands")
    planner = ("plan.plan_command", "plan.predict_command", "plan.simulate_command", "plan.replay_command")
    others = ("lab.calibrate_command", "cluster.cli_commands", "model.cli_commands", "site")
    for name in (*rooms, *planner, *others):
        name = f"labkit.{name}"
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name).register(app)


_mount()


def main() -> None:
    """What no command could tell: a stdout that takes no more (a full disk), or has no sign for a letter."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except OSError as error:
        print(f"labkit: {sentence(error)}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what stdout still holds would be written, and fail, again
        sys.exit(2)


if __name__ == "__main__":
    main()
