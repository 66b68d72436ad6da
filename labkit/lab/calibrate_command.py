"""`labkit calibrate`: measure what steps cost on this machine, so that predictions for it are its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labkit.lab.shell import sentences
from labkit.paths import require_writable

if TYPE_CHECKING:
    from labkit.plan.calibration import Calibration


def register(app: typer.Typer) -> None:
    app.command()(calibrate)


def calibrate(
    model: Annotated[str, typer.Option(help="Whose steps: a name under data/models, or a folder.")] = "lab-30m",
    layout: Annotated[
        list[str] | None, typer.Option("--layout", help="tp1, tp2 …; may be repeated. Default: one split of each kind.")
    ] = None,
    ranks: Annotated[int, typer.Option(help="Of the pool; 0: one a GPU or a core, at least 2.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="How often the layouts take turns.")] = 2,
    quick: Annotated[bool, typer.Option("--quick", help="One round of fewer steps.")] = False,
    anyway: Annotated[bool, typer.Option("--anyway", help="Measure although others use this machine.")] = False,
    out: Annotated[str, typer.Option(help="The file; by default calibrations/ under LABKIT_HOME.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Nothing on stdout but one JSON line.")] = False,
) -> None:
    """Run designed steps on the real engine (minutes), fit what they cost, and keep it; the last line is JSON."""
    with sentences():
        from labkit.lab.calibrate_plan import calibrate as measure
        from labkit.lab.calibrate_plan import plan_of

        plan = plan_of(
            model, layout or [], ranks, rounds=1 if quick else rounds, effort=0.5 if quick else 1.0, anyway=anyway
        )
        if out:
            require_writable(out)
        typer.echo(f"{plan.sentence} Ctrl-C stops it and leaves nothing behind.", err=True)
        show = _Line()
        found, path = measure(plan, Path(out) if out else None, show)
        show.end()
    if not as_json:
        _tell(found)
        typer.echo(f"Kept as {path}; labkit plan and labkit simulate use it with --gpus here --engine labkit.")
    typer.echo(json.dumps(_summary(found, path)))


class _Line:
    """How far it is: one line that is written over on a terminal, else a line a layout."""

    def __init__(self) -> None:
        self._said = ""

    def __call__(self, what: str, share: float) -> None:
        if sys.stderr.isatty():
            typer.echo(f"\r{share:4.0%}  {what:<60}", err=True, nl=False)
        elif (head := what.partition(":")[0]) != self._said:
            self._said = head
            typer.echo(f"{share:4.0%}  {head}", err=True)

    def end(self) -> None:
        if sys.stderr.isatty():
            typer.echo("\r" + " " * 66 + "\r", err=True, nl=False)


def _tell(found: Calibration) -> None:
    from labkit.plan.work import StepWork

    head = f"{'layout':<10}{'steps':>7}{'left out':>10}{'error':>8}{'bias':>8}"
    typer.echo(f"{head}{'decode of 1':>13}{'of 8':>9}{'256 tokens':>12}")
    works = (
        StepWork(decodes=1, decode_context=160, logits=1),
        StepWork(decodes=8, decode_context=8 * 160, logits=8),
        StepWork(prefill_tokens=256, prefill_seqs=1, prefill_pairs=256 * 257 // 2, logits=1),
    )
    for name, fit in found.layouts.items():
        ms = [fit.cost().seconds(work) * 1e3 for work in works]
        typer.echo(
            f"{name:<10}{fit.num_steps:>7}{fit.num_dropped:>10}{fit.error:>8.1%}{fit.bias:>+8.1%}"
            f"{ms[0]:>10.1f} ms{ms[1]:>6.1f} ms{ms[2]:>9.0f} ms"
        )
    for note in found.notes:
        typer.echo(note)


def _summary(found: Calibration, path: Path) -> dict[str, Any]:
    layouts = {
        name: {"steps": fit.num_steps, "left_out": fit.num_dropped, "error": fit.error, "bias": fit.bias}
        for name, fit in found.layouts.items()
    }
    return {"path": str(path), **found.about, "notes": list(found.notes), "layouts": layouts}
