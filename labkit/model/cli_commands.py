"""Shell commands that hold a model in their own process: `labkit export-model`, `labkit balance`."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("export-model")(export_model)
    app.command()(balance)


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


def balance(
    model: Annotated[str, typer.Argument(help="A name under data/models, a folder, or a config.json.")],
    pp: Annotated[int, typer.Option(help="Stages.")] = 2,
    seqs: Annotated[int, typer.Option(help="Decodes in the measured step.")] = 8,
    context: Annotated[int, typer.Option(help="Their context, in tokens.")] = 128,
    prefill: Annotated[int, typer.Option(help="Measure a prompt of so many tokens instead.")] = 0,
    threads: Annotated[int, typer.Option(help="As the ranks will have.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Nothing on stdout but one JSON line.")] = False,
) -> None:
    """Measure embedding, layers and head on one rank, and say which layers each pipeline stage should hold."""
    import torch

    from labkit.engine.part_times import StepKind, measure_parts
    from labkit.layout import balance_stages

    torch.set_num_threads(threads)
    try:
        split = balance_stages(measure_parts(model, StepKind(seqs, context, prefill)), pp)
    except (ValueError, FileNotFoundError) as problem:
        typer.echo(str(problem), err=True)
        raise typer.Exit(2) from None
    typer.echo(json.dumps(split.figures()) if as_json else split.table())
