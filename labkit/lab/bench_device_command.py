"""`labkit bench device`: copy bandwidth and matrix rate of each rank's device."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

import typer

from labkit.lab.shell import sentences


def device(
    ranks: Annotated[int, typer.Option(help="So many ranks: each alone, then all at once.")] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda; empty: what is there.")] = "",
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", help="Of the products; may be repeated; default: float32, bfloat16.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Of each CPU rank; 0: the cores shared out.")] = 0,
    buffer: Annotated[str, typer.Option(help="Bytes to copy: 1GiB …; 0: several times the last cache.")] = "0",
    side: Annotated[int, typer.Option(help="Of the square matrices; 0: 1024 on a CPU, 8192 on a GPU.")] = 0,
    warmup: Annotated[int, typer.Option(help="Rounds before the measured ones.")] = 2,
    rounds: Annotated[int, typer.Option(help="Measured rounds.")] = 10,
    check: Annotated[bool, typer.Option(help="Verify results.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Nothing on stdout but one JSON line.")] = False,
) -> None:
    """Copy bandwidth (GB/s) and matrix rate (GFLOP/s) of each rank's device; the last line is JSON.

    The ceilings are kept, and `labkit profile` on this host prints its rates beside them.
    """
    with sentences():
        from labkit.cluster.crew import PoolError
        from labkit.cluster.topology import default_threads, look_at_machine, usable_cores
        from labkit.lab.bench_device import DevicePlan, device_summary, measure_device
        from labkit.lab.ceilings import keep
        from labkit.server.sizes import parse_bytes

        plan = DevicePlan(
            num_ranks=ranks, dtypes=tuple(dtype or ("float32", "bfloat16")),
            device=device or look_at_machine().backend,
            threads=threads or default_threads(usable_cores(), max(1, ranks)),
            num_bytes=parse_bytes(buffer), side=side, num_warmup=warmup, num_rounds=rounds, check=check,
        )  # fmt: skip
        if not as_json:
            typer.echo(f"{plan.num_ranks} × {plan.device}, {plan.threads} threads each; base-10 units\n{_HEAD}")
        try:
            rows = asyncio.run(measure_device(plan, None if as_json else lambda each: typer.echo(_line(each))))
        except (PoolError, RuntimeError) as error:
            raise ValueError(str(error)) from error
        found = device_summary(plan, rows)
        found["kept"] = keep(found)
    typer.echo(json.dumps(found))
    if found["wrong"]:
        typer.echo(f"labkit: {found['wrong']} elements of the results were wrong.", err=True)
        raise typer.Exit(1)


_HEAD = f"{'work':<8}{'dtype':<10}{'size':>12}{'time µs':>12}{'rate':>10}{'best':>10}  unit     {'wrong':>5}  rank"


def _line(each: dict[str, Any]) -> str:
    notes = (", all at once" if each["together"] else ", alone") + (" (fits a cache)" if each["in_cache"] else "")
    return (
        f"{each['what']:<8}{each['dtype']:<10}{each['size']:>12}{each['time_us']:>12.0f}{each['rate']:>10.1f}"
        f"{each['best_rate']:>10.1f}  {each['unit']:<8} {each['wrong']:>5}  {each['rank']}{notes}"
    )
