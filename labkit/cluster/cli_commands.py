"""Shell commands of the machine room: `labkit doctor`."""

from __future__ import annotations

import typer

_MARKS = {"ok": "[green]✓[/green]", "warn": "[yellow]![/yellow]", "fail": "[red]✕[/red]"}


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(as_json: bool = typer.Option(False, "--json", help="One JSON object a line.")) -> None:
    """Look at this machine before a launch: what is there, what is wrong, and how to mend it."""
    from labkit.cluster.doctor import FAIL, examine

    findings = list(examine())
    if as_json:
        import json
        from dataclasses import asdict

        for finding in findings:
            typer.echo(json.dumps(asdict(finding)))
    else:
        from rich.console import Console

        console = Console()
        for finding in findings:
            console.print(f"{_MARKS[finding.level]} [bold]{finding.name}[/bold]  {finding.found}", highlight=False)
            if finding.remedy:
                console.print(f"    → {finding.remedy}", highlight=False)
    raise typer.Exit(1 if any(finding.level == FAIL for finding in findings) else 0)
