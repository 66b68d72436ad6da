"""`labkit predict`: what the planner says of measured rows, one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from labkit.plan.shell import sentences
from labkit.plan.strict_json import json_line


def predict(
    rows: Annotated[Path, typer.Argument(help="A CSV with the columns of measured/serving_hopper.csv.")],
    out: Annotated[Path, typer.Option(help="With ttft_ms, tpot_ms, kv_full, source, band_*, refused.")],
    as_json: Annotated[bool, typer.Option("--json", help="Nothing on stdout but one JSON line.")] = False,
) -> None:
    """Predict TTFT and TPOT of each row; one that cannot be predicted says why in `refused`."""
    with sentences():
        from labkit.plan.predict_rows import predict_file

        number, refused = predict_file(rows, out)
    if not as_json:
        typer.echo(f"{number} rows, {refused} refused: {out}")
    typer.echo(json_line({"rows": number, "refused": refused, "out": str(out)}))


def register(app: typer.Typer) -> None:
    app.command()(predict)
