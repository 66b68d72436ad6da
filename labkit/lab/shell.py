"""What all shell commands do alike: errors become one sentence and an exit code, words become settings."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import typer

from labkit.paths import sentence


def read_settings(words: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE, the value read as JSON where it is JSON (64, true), else as text."""
    settings: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f"--set {word} has no value: write NAME=VALUE, such as router=prefix.")
        try:
            settings[name.replace("-", "_")] = json.loads(text)
        except ValueError:
            settings[name.replace("-", "_")] = text
    return settings


def token() -> str:
    return os.environ.get("LABKIT_TOKEN", "")


@contextlib.contextmanager
def sentences() -> Iterator[None]:
    """Exit code 2 for what the message explains, 130 for Ctrl-C."""
    from labkit.cluster.engine_plan import EngineError
    from labkit.load.driver import DriverError
    from labkit.load.trial import ServerUnusable
    from labkit.measure.store import StoreError
    from labkit.server.client import ServerError

    known = (ServerError, ServerUnusable, DriverError, StoreError, EngineError)
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("labkit: stopped before anything was measured.", err=True)
        raise typer.Exit(130) from None
    except (*known, ValueError, OSError, KeyError) as error:
        typer.echo(f"labkit: {sentence(error)}", err=True)
        raise typer.Exit(2) from error
