"""What the planner's shell commands do alike: an error becomes one sentence on stderr and exit code 2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer

from labkit.paths import sentence


@contextlib.contextmanager
def sentences() -> Iterator[None]:
    """As `labkit.lab.shell.sentences`, which lies above this room: 2 for what the message explains, 130 for Ctrl-C."""
    from labkit.measure.store import StoreError

    try:
        yield
    except KeyboardInterrupt:
        typer.echo("labkit: stopped.", err=True)
        raise typer.Exit(130) from None
    except (StoreError, ValueError, OSError, KeyError) as error:
        typer.echo(f"labkit: {sentence(error)}", err=True)
        raise typer.Exit(2) from error
