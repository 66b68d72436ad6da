"""Lesson 00: prefill and decode, the four resources, and why means lie.

The exercise is the definition of TTFT and TPOT: from one request's instants, as a client sees them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.lab import Run
from labkit.layout import Layout, StepShape, StepWork, step_card, step_work
from labkit.measure.breakdown import phase_of
from labkit.measure.metrics import counted, ttft_ms
from labkit.teach.checks import Check, Problem, show_check
from labkit.teach.html import Table
from labkit.teach.machine import Roofs
from labkit.teach.readings import completed_per_s
from labkit.teach.reference import MIB, ReferenceCase

__all__ = [
    "bounds_ms",
    "check_ttft_tpot",
    "completed_per_s",
    "prefill_ms_per_token",
    "resources",
    "ttft_tpot",
    "where_the_mean_lies",
]
_MS = 1_000_000


def resources(case: ReferenceCase, layout: str, prompt: int, context: int, answers: int) -> Table:
    """The four resources of a prefill of `prompt` tokens and of a decode step of `answers` sequences."""
    parsed, spec, size = Layout.parse(layout), case.spec, case.dtype_bytes
    steps = [StepShape(prefill_tokens=prompt), StepShape(decode_seqs=answers, context_tokens=context)]
    works = [step_work(parsed, spec, step, size) for step in steps]
    wires = [sum(card.wire_bytes for card in step_card(parsed, spec, step, size)) for step in steps]
    rows = [
        ["parameter memory of a rank", *(f"{work.rank_weight_bytes / MIB:.1f} MiB" for work in works)],
        ["KV memory of a rank, after it", *(f"{work.rank_kv_bytes / MIB:.2f} MiB" for work in works)],
        ["compute of a rank", *(f"{work.step_flops / 1e9:.2f} GFLOP" for work in works)],
        ["memory that a rank reads", *(f"{work.step_read_bytes / MIB:.1f} MiB" for work in works)],
        ["communication: a rank sends", *(f"{wire / 1024:.0f} KiB" for wire in wires)],
        ["operations per byte read", *(f"{work.step_flops / work.step_read_bytes:.1f}" for work in works)],
    ]
    columns = ["", f"prefill, {prompt} tokens", f"decode, {answers} sequences of {context}"]
    remark = "Predicted, from the shapes alone."
    return Table(f"One step of {case.model} under {parsed}", columns, rows, [remark])


def prefill_ms_per_token(run: Run) -> float:
    """Over the steps that carried prompt tokens and nothing else: plan sent to ids back."""
    steps = [step for step in run.step_records if phase_of(step) == "prefill"]
    return sum(step.end_ns - step.start_ns for step in steps) / 1e6 / sum(step.prefill_tokens for step in steps)


def bounds_ms(case: ReferenceCase, layout: str, roofs: Roofs, run: Run) -> dict[str, float]:
    """Least ms of a decode step and of a prompt token, for the steps that `run` had.

    All ranks of a replica together, for on one machine they share its roofs.
    """
    parsed, steps = Layout.parse(layout), run.step_records
    decodes = [step for step in steps if phase_of(step) == "decode"]
    context = round(sum(step.context_tokens / step.num_decode_seqs for step in decodes) / len(decodes))
    read = _work(parsed, case, StepShape(decode_seqs=1, context_tokens=context)).step_read_bytes
    prefills = [step.prefill_tokens for step in steps if phase_of(step) == "prefill"]
    chunk = round(sum(prefills) / len(prefills))
    flops = _work(parsed, case, StepShape(prefill_tokens=chunk)).step_flops
    ranks = parsed.ranks_per_replica
    return {"decode": roofs.read_ms(read * ranks), "prefill": roofs.compute_ms(flops * ranks) / chunk}


def _work(layout: Layout, case: ReferenceCase, step: StepShape) -> StepWork:
    return step_work(layout, case.spec, step, case.dtype_bytes)


def where_the_mean_lies(runs: dict[str, Run]) -> Table:
    """Mean TTFT beside the percentiles, and how many requests were faster than the mean."""
    rows = []
    for label, run in runs.items():
        ladder = run.summary["ttft_ms"]
        values = [ttft for record in counted(run.records, run.window) if (ttft := ttft_ms(record)) is not None]
        faster = sum(value < ladder["mean"] for value in values) / len(values)
        grey = " (too few samples)" if "p99" in ladder["few"] else ""
        rows.append(
            [label, f"{ladder['p50']:.0f} ms", f"{ladder['mean']:.0f} ms", f"{ladder['p99']:.0f} ms{grey}"]
            + [f"{faster:.0%} of {len(values)}"]
        )
    columns = ["TTFT", "p50", "mean", "p99", "requests that were faster than the mean"]
    return Table("Whom the mean describes", columns, rows)


def ttft_tpot(scheduled_ns: int, chunk_ns: list[int], chunk_tokens: list[int]) -> tuple[float | None, float | None]:
    """The solution. TTFT and TPOT in ms; None where there is none."""
    bearing = [(at, k) for at, k in zip(chunk_ns, chunk_tokens, strict=True) if k > 0]
    if not bearing:
        return None, None
    first, last = bearing[0][0], bearing[-1][0]
    n = sum(k for _, k in bearing)
    tpot = (last - first) / 1e6 / (n - 1) if n > 1 and last > first else None
    return (first - scheduled_ns) / 1e6, tpot


def check_ttft_tpot(function: Callable[..., Any]) -> Check:
    """Cases in which published tools went wrong."""
    return show_check(function, _CASES)


def _case(scheduled: int, chunks: list[int], tokens: list[int], expected: Any, why: str) -> Problem:
    return Problem((scheduled * _MS, [at * _MS for at in chunks], tokens), expected, why, f"{chunks} {tokens}")


_CASES = (
    _case(100, [150, 160, 170, 180], [1, 1, 1, 1], (50.0, 10.0), "the plain case: n tokens have n − 1 gaps"),
    _case(100, [110, 150, 160], [0, 1, 1], (50.0, 10.0), "a first chunk that bears a role and no token"),
    _case(100, [150, 190], [1, 4], (50.0, 10.0), "several tokens in one chunk"),
    _case(100, [150, 160, 900], [1, 1, 0], (50.0, 10.0), "a last chunk that bears usage and no token"),
    _case(100, [150], [1], (50.0, None), "one token has no gap"),
    _case(100, [110], [0], (None, None), "no token at all"),
)
