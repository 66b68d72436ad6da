"""`python -m labkit.server serve …`: how a detached server is started, without the rest of the command line."""

from __future__ import annotations

import typer

from labkit.server.cli_commands import register

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
register(app)

if __name__ == "__main__":
    app()
