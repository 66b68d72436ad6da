"""Shell commands of the model room: `labkit export-model`."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("export-model")(export_model)


def export_model(
    model: Annotated[str, typer.Argument(help="A name under data/models, a folder, or a config.json.")],
    folder: Annotated[str, typer.Argument(help="Where to write: empty, or not there yet.")],
    seed: Annotated[int, typer.Option(help="Of the random weights; the same as `labkit serve` uses.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Write the random weights that our ranks make up as a Hugging Face checkpoint, for other engines."""
    from labkit.model.export import export_checkpoint

    try:
        typer.echo(export_checkpoint(model, folder, seed, dtype))
    except (ValueError, FileNotFoundError) as problem:
        typer.echo(str(problem), err=True)
        raise typer.Exit(2) from None
