"""What one kind of step handed to other ranks, read off a run's recorded operations, beside what the shapes say.

A run has steps of many sizes; the largest ones of a phase are alike, so that their operations can be held against a
card to the byte. All figures are of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.lab import Run
from labkit.layout import AxisCard, Crossing, Improvement, Layout, StepShape, step_card
from labkit.measure.breakdown import phase_of
from labkit.teach.html import Table
from labkit.teach.reference import MIB, ReferenceCase

_NAMES = {"isend": "send"}
"""As the recorder has an operation that a card calls otherwise."""


@dataclass(frozen=True)
class Operation:
    """`per_step` operations of `num_bytes` each, which a rank gives to them."""

    axis: str
    name: str
    per_step: float
    num_bytes: float

    def wire_bytes(self, degree: int) -> float:
        """Sent by a rank in a step, by ring algorithms."""
        crossing = Crossing("isend" if self.name == "send" else self.name, 1, round(self.num_bytes), "")
        return self.per_step * crossing.wire_bytes(degree)


def largest_steps(run: Run, phase: str) -> tuple[StepShape, list[int]]:
    """The shape of the run's largest pure steps of a phase, and their ids. ValueError when it had none."""
    steps = [step for step in run.step_records if phase_of(step) == phase and step.ranks]
    if not steps:
        raise ValueError(f"Run {run.run_id} had no pure {phase} step: keep one request in flight, or ask for more.")
    size = max((step.prefill_tokens, step.num_decode_seqs) for step in steps)
    mine = [step for step in steps if (step.prefill_tokens, step.num_decode_seqs) == size]
    context = sum(step.context_tokens for step in mine) // (len(mine) * max(1, size[1]))
    shape = StepShape(prefill_tokens=size[0], decode_seqs=size[1], context_tokens=context if phase == "decode" else 0)
    return shape, [step.step_id for step in mine]


def operations(run: Run, phase: str, axis: str = "", rank: int = 0) -> list[Operation]:
    """Of the largest steps of a phase, by axis and kind of operation; a wait that moved nothing is none."""
    _, ids = largest_steps(run, phase)
    rows = run.collectives
    rows = rows[rows["step_id"].isin(ids) & (rows["rank"] == rank) & (rows["bytes"] > 0) & (rows["op"] != "recv")]
    found = rows.groupby(["axis", "op"], observed=True)["bytes"].agg(["count", "mean"])
    return [
        Operation(at, op, float(row["count"]) / len(ids), float(row["mean"]))
        for (at, op), row in found.iterrows()
        if row["count"] and (not axis or at == axis)
    ]


def five_questions(case: ReferenceCase, run: Run, phase: str, axes: Sequence[str] = ()) -> Table:
    """The card of a run's axes (all of them, or those named) for its largest steps of a phase."""
    layout, (shape, ids) = Layout.parse(run.summary["layout"]), largest_steps(run, phase)
    cards = step_card(layout, case.spec, shape, case.dtype_bytes)
    rows = [row for card in cards if not axes or card.axis in axes for row in _answers(card, run, phase)]
    size = f"{shape.prefill_tokens} prompt tokens" if phase == "prefill" else f"{shape.decode_seqs} decodes"
    remark = "Bytes are what one rank gives to an operation; KV is what the step's tokens take."
    columns = ["", "", "by the shapes", "in this run"]
    return Table(f"{layout}: a step of {size} ({len(ids)} of them)", columns, rows, [remark])


def _answers(card: AxisCard, run: Run, phase: str) -> list[list[str]]:
    held = max(rank["weights"] for rank in run.summary["memory_bytes"])
    recorded = operations(run, phase, card.axis)
    cut = "; ".join(f"{s.part} {_size(s.without_bytes)} → {_size(s.with_bytes)}" for s in card.partitioned)
    said = "; ".join(f"{_NAMES.get(op.operation, op.operation)} of {op.bytes_each:,} B: {op.what}" for op in card.ops)
    seen = "; ".join(f"{op.name} of {op.num_bytes:,.0f} B" for op in recorded)
    counts = ", ".join(f"{op.count} {_NAMES.get(op.operation, op.operation)}" for op in card.ops)
    counted = ", ".join(f"{op.per_step:g} {op.name}" for op in recorded)
    kept = ", ".join(s.part for s in card.replicated)
    return [
        [f"{card.axis} {card.degree}", "what is partitioned?", cut or "no bytes, only work", ""],
        ["", "what stays replicated?", kept or "nothing", f"{_size(held)} of weights on the fullest rank"],
        ["", "what crosses?", said or "nothing", seen or "nothing"],
        ["", "how often in a step?", counts or "never", counted or "never"],
        ["", "what does it improve?", "; ".join(map(_change, card.improves)) or "no bytes, no operations", ""],
    ]


def _change(change: Improvement) -> str:
    name = change.quantity.removesuffix("_bytes").replace("_", " ")
    show = _size if change.quantity.endswith("_bytes") else "{:,}".format
    return f"{name} {show(change.without)} → {show(change.with_axis)}"


def _size(num_bytes: float) -> str:
    if num_bytes >= MIB:
        return f"{num_bytes / MIB:.4g} MiB"
    return f"{num_bytes / 1024:.4g} KiB" if num_bytes >= 1024 else f"{num_bytes:.0f} B"
