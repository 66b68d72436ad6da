"""What crossed between ranks, read off a run's recorded collectives, beside what the shapes say.

A message is an all-reduce, counted once for its group, or a hidden state that one stage hands to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.lab import Run
from labkit.layout import AxisCard, Improvement, Layout, StepShape, step_card
from labkit.teach.html import Table
from labkit.teach.reference import MIB, ReferenceCase


def _messages(run: Run, phase: str, axis: str = "") -> Any:
    """Rows of messages in steps of that phase; a wait for a send leaves a row of 0 bytes, which is none."""
    rows = run.collectives
    mine = rows[(rows["phase"] == phase) & rows["op"].isin(["all_reduce", "recv"]) & (rows["bytes"] > 0)]
    return mine[mine["axis"] == axis] if axis else mine


def message_us(run: Run, phase: str = "decode", axis: str = "") -> float:
    """Median µs of the transfer of one message."""
    return float(_messages(run, phase, axis)["transfer_ns"].median() / 1000)


def message_bytes(run: Run, phase: str, axis: str = "") -> int:
    """Median size of a message: what one rank gave to the sum, or sent."""
    mine = _messages(run, phase, axis)
    return int(mine["bytes"].median()) if len(mine) else 0


def messages_per_step(run: Run, phase: str, axis: str = "") -> float:
    """Messages of one step, through all its stages, each counted once."""
    mine = _messages(run, phase, axis)
    if not len(mine):
        return 0.0
    first = mine[mine["group_id"].isin(_first_groups(mine))]
    return len(first.drop_duplicates(["epoch", "step_id", "group_id", "seq"])) / first["step_id"].nunique()


def _first_groups(rows: Any) -> set[int]:
    """Of pp, whose groups carry the same hidden states side by side, the first; of other axes, every group."""
    pp = rows.loc[rows["axis"] == "pp", "group_id"]
    return {*rows.loc[rows["axis"] != "pp", "group_id"], *([pp.min()] if len(pp) else [])}


def crossings_table(runs: dict[str, Run], groups: dict[str, list[dict[str, Any]]]) -> Table:
    """What each axis of each run moved in a prefill step, over which fabric, and whether that spans nodes.

    groups: label → `lab.state()["groups"]` under that layout.
    """
    rows = []
    for label, run in runs.items():
        for axis in ("tp", "pp"):
            carried = [group for group in groups[label] if group["axis"] == axis]
            if not carried:
                continue
            count, size = messages_per_step(run, "prefill", axis), message_bytes(run, "prefill", axis)
            across = "across nodes" if any(group["spans_nodes"] for group in carried) else "within a node"
            fabrics = ", ".join(sorted({group["fabric"] for group in carried}))
            rows.append([label, axis, fabrics, across, f"{count:.0f}", f"{size / MIB:.2f} MiB"])
    columns = ["layout", "axis", "fabric", "", "messages in a prefill step", "each of"]
    return Table("What crosses, and where", columns, rows, ["Counted from the recorded collectives."])


def five_questions(case: ReferenceCase, run: Run, phase: str = "decode", **shape: int) -> Table:
    """The card of every axis of the run's layout: what the shapes say, and beside it what was recorded.

    shape: the step, as `StepShape` takes it (prefill_tokens, decode_seqs, context_tokens).
    """
    layout, rows = Layout.parse(run.summary["layout"]), []
    for card in step_card(layout, case.spec, StepShape(**shape), case.dtype_bytes):
        rows += [[card.axis if at == 0 else "", *row] for at, row in enumerate(_answers(card, run, phase))]
    return Table(f"{layout}: the five questions", ["axis", "", "by the shapes", "in this run"], rows)


def _answers(card: AxisCard, run: Run, phase: str) -> list[list[str]]:
    held = max(rank["weights"] for rank in run.summary["memory_bytes"])
    parts = [f"{share.part} {_size(share.without_bytes)} → {_size(share.with_bytes)}" for share in card.partitioned]
    kept = [f"{share.part} {_size(share.with_bytes)}" for share in card.replicated]
    ops = [f"{op.count} × {op.bytes_each:,} B, {op.operation}: {op.what}" for op in card.ops]
    count, each = messages_per_step(run, phase, card.axis), message_bytes(run, phase, card.axis)
    return [
        ["what is partitioned", f"{', '.join(parts)}; a rank, mean", f"fullest rank: {_size(held)} of weights"],
        ["what stays replicated", ", ".join(kept) or "nothing", ""],
        ["what crosses", "; ".join(ops) or "nothing", f"messages of {each:,} B" if each else "none"],
        ["how often", f"{sum(op.count for op in card.ops)} in the step", f"{count:.3g} in a {phase} step"],
        ["what it improves", _changes(card.improves), ""],
        ["what it costs", _changes(card.costs), ""],
    ]


def _changes(changes: Sequence[Improvement]) -> str:
    """`rank weight 112 MiB → 64 MiB; steps in flight 1 → 2`."""
    words = []
    for change in changes:
        show = _size if change.quantity.endswith("_bytes") else "{:,}".format
        name = change.quantity.removesuffix("_bytes").replace("_", " ")
        words.append(f"{name} {show(change.without)} → {show(change.with_axis)}")
    return "; ".join(words) or "nothing in one step"


def _size(num_bytes: float) -> str:
    if num_bytes >= MIB:
        return f"{num_bytes / MIB:.1f} MiB"
    return f"{num_bytes / 1024:.1f} KiB" if num_bytes >= 1024 else f"{num_bytes:.0f} B"
