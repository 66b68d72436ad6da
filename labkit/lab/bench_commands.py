"""`labkit bench`: what the machine gives, measured on ranks of its own."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labkit.lab.bench_device_command import device
from labkit.lab.shell import sentences

if TYPE_CHECKING:
    from labkit.lab.bench import BenchPlan

bench = typer.Typer(no_args_is_help=True, help="Measure what the ranks have, and what joins them.")


def register(app: typer.Typer) -> None:
    bench.command()(device)
    app.add_typer(bench, name="bench")


@bench.callback()
def _bench() -> None:
    """Measure what the ranks have, and what joins them."""


@bench.command()
def collectives(
    ranks: Annotated[int, typer.Option(help="So many ranks in one group; or name a --layout.")] = 0,
    layout: Annotated[str, typer.Option(help="Whose groups: tp2, pp2xtp2 …")] = "",
    axis: Annotated[str, typer.Option(help="The axis whose groups are measured.")] = "",
    op: Annotated[list[str] | None, typer.Option("--op", help="all_reduce …; may be repeated; default: all.")] = None,
    min_bytes: Annotated[str, typer.Option(help="Smallest buffer: 1024, 4KiB …")] = "64",
    max_bytes: Annotated[str, typer.Option(help="Largest buffer.")] = "4MiB",
    factor: Annotated[int, typer.Option(help="Each size is so many times the one before.")] = 4,
    warmup: Annotated[int, typer.Option(help="Rounds before the measured ones.")] = 5,
    rounds: Annotated[int, typer.Option(help="Measured rounds of each size.")] = 20,
    fabric: Annotated[str, typer.Option(help="shm, gloo or nccl; empty: what suits the device.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda; empty: what is there.")] = "",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    check: Annotated[bool, typer.Option(help="Verify results.")] = True,
    model: Annotated[str, typer.Option(help="Mark this model's own messages on the lines.")] = "lab-30m",
    nodes: Annotated[int, typer.Option(help="Make so many nodes on this machine (Linux, root).")] = 0,
    ranks_per_node: Annotated[int, typer.Option(help="Of each such node.")] = 1,
    link: Annotated[str, typer.Option(help="Rate of the link between them: 100mbit …")] = "",
    pairs: Annotated[bool, typer.Option("--pairs", help="Instead: latency and bandwidth of every two ranks.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Nothing on stdout but one JSON line.")] = False,
) -> None:
    """Time, bandwidth and correctness of collectives by size, as nccl-tests tells them; the last line is JSON."""
    with sentences():
        from labkit.cluster.crew import PoolError
        from labkit.lab.bench import marks, measure, measure_pairs, pairs_summary, summary
        from labkit.layout import StepShape

        plan = _plan(
            ranks=ranks, layout=layout, axis=axis, ops=op or [], lengths=(min_bytes, max_bytes, factor), warmup=warmup,
            rounds=rounds, fabric=fabric, device=device, dtype=dtype, check=check, nodes=nodes,
            ranks_per_node=ranks_per_node, link=link,
        )  # fmt: skip
        head, line, work = (_PAIRS_HEAD, _pair_line, measure_pairs) if pairs else (_head(plan), _line, measure)
        if not as_json:
            typer.echo(head)
        try:
            rows = asyncio.run(work(plan, None if as_json else lambda each: typer.echo(line(each))))
        except (PoolError, RuntimeError) as error:
            raise ValueError(str(error)) from error
        decode = StepShape(decode_seqs=1, context_tokens=512)
        steps = {"prefill 512": StepShape(prefill_tokens=512), "decode 1": decode}
        if pairs:
            found = pairs_summary(plan, rows)
        else:
            found = {**summary(plan, rows), "model": model, "marks": marks(plan, model, rows, steps) if model else []}
    if not as_json and not pairs:
        _tell(found)
    typer.echo(json.dumps(found))
    if found["wrong"]:
        typer.echo(f"labkit: {found['wrong']} elements of the results were wrong.", err=True)
        raise typer.Exit(1)


def _plan(
    *, ranks: int, layout: str, axis: str, ops: list[str], lengths: tuple[str, str, int], warmup: int, rounds: int,
    fabric: str, device: str, dtype: str, check: bool, nodes: int, ranks_per_node: int, link: str,
) -> BenchPlan:  # fmt: skip
    from labkit.cluster.nodes import Link, Nodes, why_not
    from labkit.cluster.topology import look_at_machine
    from labkit.lab.bench import BenchPlan
    from labkit.layout import AXES, Layout
    from labkit.measure.collectives import OPS, sizes
    from labkit.server.sizes import parse_bytes

    made = Nodes(nodes, ranks_per_node, Link.parse(link, 0.0)) if nodes else None
    if made and (reason := why_not()):
        raise ValueError(reason)
    split = Layout.parse(layout) if layout else Layout(tp=ranks or (made.num_ranks if made else 2))
    if layout and ranks and ranks < split.world_size:
        raise ValueError(f"{split} needs {split.world_size} ranks, and --ranks is {ranks}: leave --ranks away.")
    if made and made.num_ranks < split.world_size:
        raise ValueError(f"{split} needs {split.world_size} ranks, and the nodes have {made.num_ranks}.")
    several = [name for name in AXES if len(split.groups(name)[0]) > 1]
    kind = device or look_at_machine().backend
    smallest, largest, factor = lengths
    return BenchPlan(
        layout=split, axis=axis or (several[0] if several else "tp"), ops=tuple(ops) or OPS,
        num_bytes=sizes(parse_bytes(smallest), parse_bytes(largest), factor),
        fabric=fabric or ("nccl" if kind == "cuda" else "shm"), device=kind, dtype=dtype, num_warmup=warmup,
        num_rounds=rounds, check=check, nodes=made, num_ranks=ranks,
    )  # fmt: skip


def _head(plan: BenchPlan) -> str:
    rounds = f"{plan.num_rounds} rounds after {plan.num_warmup}"
    first = f"{plan.layout}, groups of the axis {plan.axis}, {plan.dtype}, {rounds}"
    columns = f"{'op':<15}{'bytes':>11}{'place':>7}{'time µs':>11}{'p90':>11}{'algbw':>9}{'busbw':>9}{'wrong':>7}  over"
    return f"{first}; bandwidths in GB/s (10⁹)\n{columns}"


def _line(each: dict[str, Any]) -> str:
    place = "in" if each["in_place"] else "out"
    return (
        f"{each['op']:<15}{each['bytes']:>11}{place:>7}{each['time_us']:>11.1f}{each['p90_us']:>11.1f}"
        f"{each['algbw_gb_s']:>9.3f}{each['busbw_gb_s']:>9.3f}{each['wrong']:>7}  {each['fabric']} "
        f"{','.join(map(str, each['group_ranks']))}"
    )


_PAIRS_HEAD = f"{'ranks':<9}{'latency µs':>12}{'p90':>10}{'bytes':>11}{'GB/s one way':>14}{'wrong':>7}  over"


def _pair_line(each: dict[str, Any]) -> str:
    between = f"{each['a']}, {each['b']}"
    return (
        f"{between:<9}{each['latency_us']:>12.1f}{each['latency_p90_us']:>10.1f}{each['bytes']:>11}"
        f"{each['bandwidth_gb_s']:>14.3f}{each['wrong']:>7}  {each['fabric']}"
        f"{' across nodes' if each['spans_nodes'] else ''}"
    )


def _tell(found: dict[str, Any]) -> None:
    for line in found["fits"]:
        rate = f"{line['gb_per_s']:.2f} GB/s" if line["gb_per_s"] else "no bandwidth to see at these sizes"
        place = "in place" if line["in_place"] else "out of place"
        worst = f"off by {line['worst_residual']:.0%} at most"
        typer.echo(f"{line['op']}, {place}: {line['alpha_us']:.1f} µs + {rate}; {worst}")
    for mark in found["marks"]:
        messages = f"{mark['count']} × {mark['op']} of {mark['bytes']} bytes"
        time = f", {mark['time_us']:.0f} µs each, {mark['step_us'] / 1e3:.2f} ms a step" if mark["step_us"] else ""
        typer.echo(f"{found['model']}, {mark['phase']}: {messages}{time}")
