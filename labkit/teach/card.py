"""The five questions of every axis of a layout, answered by arithmetic and, beside it, by a run.

What is partitioned, what stays replicated, what crosses, how often, what it improves. The arithmetic knows the run's
tokens and steps and assumes uniform routing; what was measured is what the ranks hold and what they handed over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import fmean
from typing import TYPE_CHECKING

from labkit.lab import Run
from labkit.layout import AxisCard, Layout, PartShare, StepShape, step_card
from labkit.teach.html import Table
from labkit.teach.reference import MIB, ReferenceCase

if TYPE_CHECKING:
    import pandas as pd

_PLAIN = {"num_replicas": "replicas", "steps_in_flight": "steps in flight", "expert_columns": "columns of an expert"}
_IN_BYTES = {
    "rank_weight_bytes": "weights of a rank",
    "rank_kv_bytes": "KV of a rank",
    "step_read_bytes": "read in a step",
}


def mean_step(run: Run) -> StepShape:
    """One replica's step of average size, idle ones left out; tokens rounded up, so that none vanishes."""
    steps = [step for step in run.step_records if step.prefill_tokens + step.num_decode_seqs]
    if not steps:
        raise ValueError(f"Run {run.run_id} has no steps: it was not recorded, or another engine's.")
    seqs = -(-sum(step.num_decode_seqs for step in steps) // len(steps))
    context = sum(step.context_tokens for step in steps) // max(1, sum(step.num_decode_seqs for step in steps))
    return StepShape(-(-sum(step.prefill_tokens for step in steps) // len(steps)), seqs, context)


def whole_run(run: Run) -> StepShape:
    """All of a run's tokens as one step: bytes that grow with the tokens add up over steps."""
    steps = run.step_records
    return StepShape(sum(step.prefill_tokens for step in steps), sum(step.num_decode_seqs for step in steps))


def card_table(case: ReferenceCase, run: Run) -> Table:
    """A block of five rows for each axis of the run's layout."""
    layout, step = Layout.parse(run.summary["layout"]), mean_step(run)
    cards = step_card(layout, case.spec, step, case.dtype_bytes)
    sums = step_card(layout, case.spec, whole_run(run), case.dtype_bytes)
    rows = [row for card, total in zip(cards, sums, strict=True) for row in _rows(card, total, run)]
    remarks = [
        "A step's bytes are those of a mean step and of one rank, steps without a request of its own included; the "
        "arithmetic assumes uniform routing. KV is left out.",
        "On CPUs a repacked copy of the output head counts with the embedding.",
    ]
    return Table(f"{layout}: five questions", ["", "", "by arithmetic", "in this run"], rows, remarks)


def _rows(card: AxisCard, total: AxisCard, run: Run) -> Iterator[list[str]]:
    name = f"{card.axis}\N{NO-BREAK SPACE}{card.degree}"
    yield [name, "what is partitioned?", _shares(card.partitioned), _held(card.partitioned, run)]
    yield ["", "what stays replicated?", _shares(card.replicated), _held(card.replicated, run)]
    yield ["", "what crosses?", _crossing(total, len(run.step_records)), _handed_over(card, run)]
    yield ["", "how often in a step?", _how_often(card), _counted(card, run)]
    yield ["", "what does it improve?", _changes(card), "–"]


def _shares(shares: tuple[PartShare, ...]) -> str:
    found = [
        f"{share.part} {_size(share.without_bytes)}" + _becomes(share) for share in shares if share.part != "kv"
    ]
    return "; ".join(found) or "nothing"


def _becomes(share: PartShare) -> str:
    return "" if share.without_bytes == share.with_bytes else f" → {_size(share.with_bytes)}"


def _held(shares: tuple[PartShare, ...], run: Run) -> str:
    """Mean over the ranks, as they told; a tied head's packed copy goes with the embedding."""
    memory = [rank["weights_by_part"] for rank in run.summary["memory_bytes"]]
    found = []
    for share in shares:
        parts = (share.part, "head") if share.part == "embedding" else (share.part,)
        if share.part != "kv":
            found.append(f"{share.part} {_size(fmean(sum(rank.get(p, 0) for p in parts) for rank in memory))}")
    return "; ".join(found) or "–"


def _crossing(total: AxisCard, num_steps: int) -> str:
    found = [f"{op.what}: {_size(op.count * op.bytes_each / num_steps)} a step" for op in total.ops]
    return "; ".join(found) or "nothing within a step"


def _how_often(card: AxisCard) -> str:
    counts: Counter[str] = Counter()
    for op in card.ops:
        counts[op.operation] += op.count
    return ", ".join(f"{count} × {name}" for name, count in counts.items()) or "never"


def _mine(card: AxisCard, run: Run) -> pd.DataFrame:
    rows = run.collectives
    return rows[(rows["axis"] == card.axis) & ~rows["op"].isin(["recv", "barrier"])] if len(rows) else rows


def _per_step(card: AxisCard, run: Run) -> dict[str, tuple[float, float]]:
    """Operation → (how often, bytes handed over) in a step, mean of the ranks."""
    rows = _mine(card, run)
    if not len(rows):
        return {}
    steps = rows.groupby("rank")["step_id"].nunique().sum()
    return {str(op): (len(own) / steps, float(own["bytes"].sum()) / steps) for op, own in rows.groupby("op")}


def _handed_over(card: AxisCard, run: Run) -> str:
    found = [f"{op}: {_size(size)} a step" for op, (_, size) in _per_step(card, run).items()]
    return "; ".join(found) or "nothing"


def _counted(card: AxisCard, run: Run) -> str:
    return ", ".join(f"{count:.3g} × {op}" for op, (count, _) in _per_step(card, run).items()) or "never"


def _changes(card: AxisCard) -> str:
    found = []
    for change in card.improves:
        if change.quantity in _IN_BYTES:
            found.append(f"{_IN_BYTES[change.quantity]} {_size(change.without)} → {_size(change.with_axis)}")
        elif change.quantity in _PLAIN:
            found.append(f"{_PLAIN[change.quantity]} {change.without} → {change.with_axis}")
        else:
            found.append(f"operations of a step {change.without / 1e6:.0f} → {change.with_axis / 1e6:.0f} M")
    return "; ".join(found) or "nothing within a step: requests of its own for each"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / MIB:.3g} MiB" if num_bytes >= MIB / 10 else f"{num_bytes / 1024:.3g} KiB"
