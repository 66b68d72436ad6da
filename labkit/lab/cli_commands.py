"""Shell commands that need no server: layouts, runs, export, explain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labkit.lab.shell import sentences

if TYPE_CHECKING:
    from labkit.layout import AnyLayout
    from labkit.measure.store import Store

_Json = Annotated[bool, typer.Option("--json", help="Nothing on stdout but one JSON line.")]


def register(app: typer.Typer) -> None:
    for command in (layouts, runs, export, explain):
        app.command()(command)
    app.command("import")(import_file)
    app.command("compare-runs")(compare_runs)


def layouts(
    model: Annotated[
        str, typer.Option(help="A name under data/models, a folder, or a config.json.")
    ] = "lab-30m",
    ranks: Annotated[int, typer.Option(help="How many ranks there are at most.")] = 8,
    engine: Annotated[bool, typer.Option("--engine", help="Only what this version's engine runs.")] = False,
    as_json: _Json = False,
) -> None:
    """Which layouts a model allows on so many ranks, and why not the others."""
    with sentences():
        from labkit.layout import deployment_choices, legal_layouts, refused_layouts
        from labkit.model.spec import load_spec

        spec = load_spec(model)
        legal = [_entry(layout) for layout in legal_layouts(spec, ranks, engine=engine)]
        pools = [_entry(deployment) for deployment in deployment_choices(spec, ranks, engine=engine)]
        refused = [
            {"layout": layout.slug, "reason": reason}
            for layout, reason in refused_layouts(spec, ranks, engine=engine)
        ]
    if as_json:
        typer.echo(json.dumps({"model": spec.name, "ranks": ranks, "legal": legal, "pools": pools, "refused": refused}))
        return
    typer.echo(f"{spec.name} on up to {ranks} ranks: " + " ".join(str(entry["layout"]) for entry in legal))
    if pools:
        typer.echo("pools with roles: " + " ".join(str(entry["layout"]) for entry in pools))
    for entry in refused:
        typer.echo(f"  not {entry['layout']}: {entry['reason']}")


def _entry(layout: AnyLayout) -> dict[str, str | int]:
    return {"layout": layout.slug, "name": str(layout), "num_ranks": layout.world_size}


def runs(
    limit: Annotated[int, typer.Option(help="How many, newest first.")] = 20, as_json: _Json = False
) -> None:
    """The runs that are stored."""
    with sentences():
        from labkit.lab.client_process import status_of
        from labkit.lab.run import open_store

        with open_store() as store:
            found = [row | {"status": status_of(row)} for row in store.runs(limit)]
    names = ("run_id", "status", "layout", "model", "workload", "rate", "started_at")
    if as_json:
        typer.echo(json.dumps([{name: row[name] for name in names} for row in found]))
        return
    for row in found:
        done = ((row["summary"] or {}).get("requests") or {}).get("completed", "–")
        typer.echo(f"{row['run_id']}  {row['status']:<8}  {row['workload']}  {done} completed")
    if not found:
        typer.echo("No run is stored yet: `labkit run` makes one.")


def explain(
    run_id: Annotated[str, typer.Argument(help="As `labkit runs` lists it; `last` is the newest.")],
    other_id: Annotated[str, typer.Argument(help="Another run, say under more load: what grew?")] = "",
    as_json: _Json = False,
) -> None:
    """Where did TTFT and TPOT go, and what holds them up: queue, compute, bandwidth, transfer or waiting."""
    with sentences():
        from labkit.lab.run import Run, open_store

        with open_store() as store:
            run = Run.load(_newest(store, run_id), store)
            other = Run.load(_newest(store, other_id), store) if other_id else None
        found = run.explanation(other)
    typer.echo(json.dumps(found.to_dict()) if as_json else repr(found))


def compare_runs(
    run_ids: Annotated[list[str], typer.Argument(help="As `labkit runs` lists them; `last` is the newest.")],
    as_json: _Json = False,
) -> None:
    """Stored runs of the same load side by side, on whichever engines, with an interval for every difference."""
    with sentences():
        from labkit.lab import screen
        from labkit.lab.compare_stored import compare_stored
        from labkit.lab.run import Run, open_store

        with open_store() as store:
            found = compare_stored([Run.load(_newest(store, run_id), store) for run_id in run_ids])
        if not as_json:
            from rich.console import Console

            Console(highlight=False).print(screen.comparison(found))
    typer.echo(json.dumps(found.to_dict()))


def _newest(store: Store, run_id: str) -> str:
    newest = store.runs(1) if run_id == "last" else []
    return str(newest[0]["run_id"]) if newest else run_id


def export(
    run_id: Annotated[str, typer.Argument(help="As `labkit runs` lists it; `last` is the newest.")],
    target: Annotated[
        Path | None, typer.Argument(help="A file for vllm and trace, a folder for parquet and csv; by the run's name.")
    ] = None,
    kind: Annotated[str, typer.Option("--format", help="vllm, trace (for Perfetto), parquet or csv.")] = "vllm",
) -> None:
    """Write a stored run out, for other tools."""
    with sentences():
        from labkit.lab.run import open_store
        from labkit.measure.export import export_run

        with open_store() as store:
            run_id = _newest(store, run_id)
            by_name = Path() if kind in ("vllm", "trace") else Path(run_id)
            made = export_run(store, run_id, kind, target or by_name)
    for path in made:
        typer.echo(path)


def import_file(
    path: Annotated[Path, typer.Argument(help="vllm bench serve's --save-detailed, or aiperf's .jsonl.")],
    layout: Annotated[str, typer.Option(help="How that server was split, where the file does not say.")] = "",
    as_json: _Json = False,
) -> None:
    """Store what another load client measured as a run."""
    with sentences():
        from labkit.lab import screen
        from labkit.lab.importing import import_results

        done = import_results(path, layout)
        if not as_json:
            from rich.console import Console

            Console(highlight=False).print(screen.summary(done.summary))
    typer.echo(json.dumps(done.summary))
