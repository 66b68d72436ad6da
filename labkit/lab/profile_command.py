"""`labkit profile`: kernels (on a CPU: operators) of some ranks and steps, by time and class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labkit.lab.shell import read_settings, sentences, token

if TYPE_CHECKING:
    from labkit.lab.ceilings import Ceilings
    from labkit.lab.profiling import Profile
    from labkit.measure.kernels import RankKernels


def register(app: typer.Typer) -> None:
    app.command()(profile)


def profile(
    layout: Annotated[str, typer.Option(help="tp1, tp2, dp2 …; empty: as it is.")] = "",
    workload: Annotated[str, typer.Option(help="A name under data/workloads, or a TOML file.")] = "chat",
    rate: Annotated[float | None, typer.Option(help="Requests per second; by default the workload's own.")] = None,
    seconds: Annotated[float, typer.Option(help="The load ends then, or once the steps have been profiled.")] = 30.0,
    steps: Annotated[int, typer.Option(help="How many steps are profiled.")] = 20,
    skip: Annotated[int, typer.Option(help="Steps before the profiled ones.")] = 5,
    rank: Annotated[list[int] | None, typer.Option("--rank", help="Whose; may be repeated; default: rank 0.")] = None,
    setting: Annotated[list[str], typer.Option("--set", help="NAME=VALUE of an engine setting.")] = [],  # noqa: B006
    server: Annotated[str, typer.Option(help="A lab server's URL; LABKIT_TOKEN is its token.")] = "",
    model: Annotated[str, typer.Option(help="Model to serve, if a server has to be started.")] = "",
    ranks: Annotated[int, typer.Option(help="Ranks, if a server has to be started.")] = 0,
    trace: Annotated[str, typer.Option(help="Write the merged trace (for Perfetto) to this file.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Nothing on stdout but one JSON line.")] = False,
) -> None:
    """Profile some steps of some ranks in a run of its own, whose latencies are no figures; the last line is JSON."""
    with sentences():
        from labkit.lab import connect

        serve: dict[str, Any] = {name: value for name, value in (("model", model), ("ranks", ranks)) if value}
        with connect(server or None, token() or None, **serve) as lab:
            found = lab.profile(
                layout or None, workload, rate, seconds, steps=steps, ranks=rank or (0,), skip=skip,
                settings=read_settings(setting),
            )  # fmt: skip
        if trace:
            found.save_trace(Path(trace))
    if not as_json:
        _tell(found)
    typer.echo(json.dumps(found.to_dict()))


def _tell(found: Profile) -> None:
    ceilings = found.ceilings
    for each in found.ranks.values():
        typer.echo(_head(each))
        if each.products:
            typer.echo(f"  {_achieved(each.products, ceilings)}")
        for work in each.works[:15]:
            share = work.ms / max(1e-9, sum(w.ms for w in each.works))
            typer.echo(f"  {work.ms:9.2f} ms {share:6.1%} {work.num:7} × {work.kind:<15} {work.name[:70]}")


def _achieved(products: dict[str, float], ceilings: Ceilings | None) -> str:
    if ceilings is not None:
        return ceilings.sentence(products)
    rates = f"products reach {products['gflop_s']:.3g} GFLOP/s and {products['gb_s']:.3g} GB/s"
    return f"{rates}; what the device can do at best is not known: labkit bench device measures it"


def _head(each: RankKernels) -> str:
    parts = ", ".join(f"{name} {ms:.1f}" for name, ms in each.parts.items())
    covered = f"; {each.covered:.0%} of communication covered by compute" if each.covered is not None else ""
    classes = ", ".join(f"{name} {ms:.1f}" for name, ms in each.classes.items() if ms)
    work = "kernels" if each.device == "cuda" else "operators"
    launches = f", {each.num_launches} launches" if each.num_launches else ""
    longest = f"; the longest idle gap in a step {each.gaps_ms[0]:.2f} ms" if each.gaps_ms else ""
    whose = f"rank {each.rank} ({each.device}): {each.num_steps} steps in {each.span_ms:.1f} ms"
    return (
        f"{whose}: {parts} ms{covered}{longest}\n"
        f"  {work} by class, ms: {classes}{launches}"
        f"{f'{chr(10)}  {each.nccl.sentence}' if each.nccl else ''}"
    )
