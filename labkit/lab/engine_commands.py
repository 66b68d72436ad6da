"""`labkit run --engine`: which options it takes, and what a shell shows while a production engine starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import typer

from labkit.lab.run import Run

_LINE_S = 0.5
_WIDTH = 150


def check_options(engine: str, *, server: str, setting: Sequence[str], ranks: int) -> None:
    """Raises ValueError with a sentence for options that would say nothing to an engine started here."""
    if not engine:
        raise ValueError("--engine-args and --engine-python belong to --engine vllm or --engine sglang: name one.")
    if server:
        raise ValueError(
            f"--engine {engine} starts a server of its own, and --server {server} names one that runs: choose one."
        )
    if setting:
        raise ValueError(
            f"--set {setting[0]} is a setting of our engine: give {engine} its own options with --engine-args."
        )
    if ranks:
        raise ValueError(f"--ranks {ranks} is for our pool: {engine} has as many ranks as its --layout.")


class StartLines:
    """The log of a server that starts, on stderr, at most two lines a second, each with the seconds so far."""

    def __init__(self) -> None:
        self._last_s = 0.0

    def __call__(self, elapsed_s: float, line: str) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s < _LINE_S and not line.startswith("ERROR"):
            return
        self._last_s = now_s
        typer.echo(f"{elapsed_s:6.1f} s  {line[:_WIDTH]}", err=True)


def start_and_run(
    engine: str, layout: str, screen: Callable[[bool], AbstractContextManager[Any]], as_json: bool, **options: Any
) -> Run:
    """The run; the moving table begins with its first update, when the log has stopped."""
    from contextlib import ExitStack

    from labkit.lab.engine_run import run_engine

    with ExitStack() as shown:
        show: list[Any] = []

        def update(figures: dict[str, Any]) -> None:
            if not show:
                show.append(shown.enter_context(screen(as_json)))
            if show[0] is not None:
                show[0](figures)

        return run_engine(engine, layout or "tp1", on_line=StartLines(), on_update=update, **options)
