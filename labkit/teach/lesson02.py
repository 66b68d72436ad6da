"""Lesson 02: tensor parallelism. Two projections are split so that one sum puts the halves together.

The first exercise is that split in NumPy; the second says which heads a rank owns, also where there are fewer KV
heads than ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.lab import Run
from labkit.layout import (
    Layout,
    StepShape,
    check_layout,
    kv_bytes_per_token,
    kv_heads,
    query_heads,
    rank_memory,
    step_card,
    step_work,
)
from labkit.model.spec import load_spec
from labkit.teach.checks import Check, Problem, show_check
from labkit.teach.html import Table
from labkit.teach.machine import Roofs
from labkit.teach.readings import message_us, messages
from labkit.teach.reference import MIB, ReferenceCase

__all__ = ["message_us"]

Array = NDArray[np.float64]


def make_mlp(seed: int = 0, tokens: int = 4, hidden: int = 16, inner: int = 64) -> tuple[Array, Array, Array]:
    """x (tokens, hidden), up (hidden, inner), down (inner, hidden), drawn from a unit normal."""
    rng = np.random.default_rng(seed)
    x, up, down = (rng.standard_normal(shape) for shape in ((tokens, hidden), (hidden, inner), (inner, hidden)))
    return x, up, down


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def mlp_partials(x: Array, up: Array, down: Array, tp: int) -> list[Array]:
    """The solution: what each rank computes alone; the sum of the list is the layer's output."""
    width = up.shape[1] // tp
    slices = [slice(rank * width, (rank + 1) * width) for rank in range(tp)]
    return [relu(x @ up[:, mine]) @ down[mine] for mine in slices]


def check_mlp_partials(function: Callable[..., Any]) -> Check:
    """The partial sums of every rank, for several degrees; a rank with the whole answer is caught."""
    x, up, down = make_mlp(7)
    cases = []
    for tp in (1, 2, 4):
        expected = mlp_partials(x, up, down, tp)
        why = "one rank: nothing to add" if tp == 1 else f"{tp} partial sums"
        cases.append(Problem((x, up, down, tp), expected, why, f"tp = {tp}"))
    return show_check(function, cases)


def heads_of(rank: int, tp: int, num_heads: int, num_kv_heads: int) -> tuple[range, range]:
    """The solution: the query heads and the KV heads of a rank."""
    queries = num_heads // tp
    mine = range(rank * queries, (rank + 1) * queries)
    if tp <= num_kv_heads:
        keys = num_kv_heads // tp
        return mine, range(rank * keys, (rank + 1) * keys)
    shared = rank // (tp // num_kv_heads)
    return mine, range(shared, shared + 1)


def check_heads_of(function: Callable[..., Any]) -> Check:
    """Held against the layouts that the engine uses, on shapes of real models."""
    cases = (
        ("lab-30m", 2, 1, "KV heads enough for both ranks"),
        ("lab-30m", 4, 3, "one KV head for each rank"),
        ("lab-30m", 8, 5, "fewer KV heads than ranks: pairs of ranks keep the same one"),
        ("lab-5m", 8, 0, "the first of such a pair"),
    )
    return show_check(function, [_heads_case(*case) for case in cases])


def _heads_case(model: str, tp: int, rank: int, why: str) -> Problem:
    spec, layout = load_spec(model), Layout(tp=tp)
    expected = (query_heads(layout, spec, rank), kv_heads(layout, spec, rank))
    args = (rank, tp, spec.num_heads, spec.num_kv_heads)
    return Problem(args, expected, why)


# ---- tables


def what_halves(case: ReferenceCase, degrees: tuple[int, ...] = (1, 2, 4, 8)) -> Table:
    """Bytes on rank 0 by part, for each degree, and what stays."""
    layouts = [Layout(tp=tp) for tp in degrees]
    memories = [rank_memory(layout, case.spec, 0, case.dtype_bytes) for layout in layouts]
    rows = []
    for part, whole in memories[0].items():
        sizes = [f"{memory[part] / MIB:.3g} MiB" for memory in memories]
        rows.append([part, *sizes, _held(whole, memories[-1][part], degrees)])
    tokens = [kv_bytes_per_token(layout, case.spec, 0, case.dtype_bytes) for layout in layouts]
    rows.append(["KV of a token", *(f"{size:,} B" for size in tokens), _held(tokens[0], tokens[-1], degrees)])
    columns = ["rank 0 holds", *(f"TP{tp}" for tp in degrees), f"from TP{degrees[0]} to TP{degrees[-1]}"]
    return Table("What a degree divides, and what it does not", columns, rows, ["Predicted, from the shapes."])


def _held(before: int, after: int, degrees: tuple[int, ...]) -> str:
    times, whole = before / after, degrees[-1] / degrees[0]
    if times > 0.99 * whole:
        return f"÷ {times:.0f}"
    return "stays whole" if times < 1.01 else f"÷ {times:.0f}, not ÷ {whole:.0f}"


def work_table(case: ReferenceCase, prompt: int, context: int, degrees: tuple[int, ...] = (1, 2, 4)) -> Table:
    """Work of one rank and its traffic in a prefill step and a decode step."""
    rows = []
    for name, step in (
        (f"prefill, {prompt} tokens", StepShape(prefill_tokens=prompt)),
        (f"decode, 1 sequence of {context}", StepShape(decode_seqs=1, context_tokens=context)),
    ):
        for tp in degrees:
            layout = Layout(tp=tp)
            work = step_work(layout, case.spec, step, case.dtype_bytes)
            cards = step_card(layout, case.spec, step, case.dtype_bytes)
            ops = [op for card in cards for op in card.ops if op.operation == "all_reduce"]
            count, size = sum(op.count for op in ops), ops[0].bytes_each if ops else 0
            sums = f"{count} of {size / 1024:g} KiB" if count else "none"
            rows.append(
                [name, str(layout), f"{work.step_flops / 1e9:.3g} GFLOP", f"{work.step_read_bytes / MIB:.1f} MiB", sums]
            )
    columns = ["step", "layout", "a rank computes", "a rank reads", "all-reduces"]
    return Table("Work per rank", columns, rows, ["Predicted, from the shapes."])


def legality_table(model: str, degrees: range = range(1, 9)) -> Table:
    """Which degrees a model allows, and the arithmetic of those that it does not."""
    spec = load_spec(model)
    answers = [(tp, check_layout(Layout(tp=tp), spec)) for tp in degrees]
    rows = [[f"TP{tp}", "legal" if answer else "refused", "" if answer else str(answer)] for tp, answer in answers]
    title = f"{model}: {spec.num_heads} query heads, {spec.num_kv_heads} KV heads, {spec.intermediate_size} columns"
    return Table(title, ["", "", "why not"], rows)


# ---- from runs


def reduce_share(run: Run, phase: str) -> float | None:
    """Share of a phase's step time that the ranks spent in collectives, waiting and transferring."""
    share = (run.summary["step_share"].get("by_phase") or {}).get(phase)
    return None if share is None else share["wait"] + share["transfer"]


def num_steps(run: Run, phase: str) -> int:
    share = (run.summary["step_share"].get("by_phase") or {}).get(phase)
    return share["num_steps"] if share else 0


def all_reduces_per_step(run: Run) -> float:
    """Of a decode step, counted from the recorded collectives."""
    return sum(each.per_step for each in messages(run, "decode", "tp"))


def decode_bound_ms(case: ReferenceCase, layout: str, roofs: Roofs, context: int = 256) -> float:
    """Least ms of a decode step of one sequence, if all ranks share this machine's memory bandwidth."""
    parsed, step = Layout.parse(layout), StepShape(decode_seqs=1, context_tokens=context)
    read = step_work(parsed, case.spec, step, case.dtype_bytes).step_read_bytes
    return roofs.read_ms(read * parsed.ranks_per_replica)
