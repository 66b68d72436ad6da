"""The card of a combination: the five questions of every axis that it uses, with this run's bytes and counts.

What is measured (bytes of weights on the ranks, crossings and their bytes) stands beside what the layout's arithmetic
says of the same step; what no run can show, such as the layout without the axis, is predicted and marked so.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from labkit.lab import Run
from labkit.layout import AxisCard, Improvement, Layout, StepShape, step_card
from labkit.measure.breakdown import phase_of
from labkit.measure.crossings import Crossings, crossings
from labkit.measure.records import StepRecord
from labkit.teach.html import Table
from labkit.teach.reference import ReferenceCase

QUESTIONS = (
    "what is partitioned",
    "what stays replicated",
    "what crosses",
    "how often, in a decode step",
    "how often, in a prefill step",
    "what it improves",
    "what it costs",
)
NOTHING = "nothing"
_NAMES = {
    "rank_weight_bytes": "weights of a rank",
    "rank_kv_bytes": "KV of a rank",
    "step_read_bytes": "bytes read in a step",
    "step_flops": "operations in a step",
    "num_replicas": "replicas",
    "steps_in_flight": "steps in flight",
    "expert_columns": "columns of an expert",
}


def five_questions(run: Run, case: ReferenceCase) -> Table:
    """A column an axis. Raises ValueError for a layout of one rank, which has no axis."""
    layout = Layout.parse(run.summary["layout"])
    if layout.world_size == 1:
        raise ValueError(f"{layout} uses no axis, so there is nothing to ask about it.")
    decode, prefill = (_typical(run.step_records, phase) for phase in ("decode", "prefill"))
    cards = step_card(layout, case.spec, decode, case.dtype_bytes)
    of_prompt = {card.axis: card for card in step_card(layout, case.spec, prefill, case.dtype_bytes)}
    columns = [_answers(run, layout, card, of_prompt[card.axis]) for card in cards]
    rows = [[question, *answers] for question, answers in zip(QUESTIONS, zip(*columns, strict=True), strict=True)]
    if set(rows[-1][1:]) == {NOTHING}:  # the question that only some layouts raise
        rows.pop()
    title = f"{layout}: five questions, by axis"
    remarks = [
        f"The typical steps of this run: a prompt's {prefill.prefill_tokens} tokens, and {decode.decode_seqs} "
        f"sequence{'s' * (decode.decode_seqs != 1)} of {decode.context_tokens} tokens decoding.",
        "Weights and crossings are measured here, with the arithmetic's own figure in brackets; the layout without "
        "the axis, and what it improves, are predicted. Bytes of a crossing are the mean over the ranks of its group: "
        "a single token is with one rank of those that share it out, and logits are gathered in one group only.",
    ]
    return Table(title, ["", *(f"{card.axis.upper()}{card.degree}" for card in cards)], rows, remarks)


def _typical(steps: Iterable[StepRecord], phase: str) -> StepShape:
    """The median step of a phase that the run really took."""
    found = [step for step in steps if phase_of(step) == phase]
    if not found:
        raise ValueError(f"The run had no pure {phase} step: take one with a single request in flight.")
    seqs = round(statistics.median(step.num_decode_seqs for step in found))
    if phase == "prefill":
        return StepShape(prefill_tokens=round(statistics.median(step.prefill_tokens for step in found)))
    context = statistics.median(step.context_tokens / step.num_decode_seqs for step in found)
    return StepShape(decode_seqs=seqs, context_tokens=round(context))


def _answers(run: Run, layout: Layout, card: AxisCard, of_prompt: AxisCard) -> list[str]:
    measured = {(each.axis, each.phase): each for each in crossings(run.collectives, run.step_records)}
    here, beside = _mean_parts(run), _groups_at_once(layout, card.axis)
    return [
        _lines(f"{s.part}: {_size(s.without_bytes)} → {_held(here, s.part, s.with_bytes)}" for s in card.partitioned),
        _lines(f"{s.part}, {s.copies:g} copies" for s in card.replicated),
        _lines(dict.fromkeys([*of_prompt.crosses, *card.crosses])),
        _often(run, measured.get((card.axis, "decode")), card, beside),
        _often(run, measured.get((card.axis, "prefill")), of_prompt, beside),
        _lines(map(_change, card.improves)),
        _lines(map(_change, card.costs)),
    ]


def _mean_parts(run: Run) -> dict[str, float]:
    """Part → measured bytes of it on a rank, on average; a tied head's copy counts as embedding."""
    ranks = [dict(rank["weights_by_part"]) for rank in run.summary["memory_bytes"]]
    for parts in ranks:
        parts["embedding"] = parts.get("embedding", 0) + parts.pop("head", 0)
    return {part: statistics.mean(parts.get(part, 0) for parts in ranks) for part in {p for r in ranks for p in r}}


def _held(measured: dict[str, float], part: str, predicted: int) -> str:
    if part not in measured:
        return f"{_size(predicted)} (predicted)"
    return f"{_size(measured[part])} ({_size(predicted)})"


def _groups_at_once(layout: Layout, axis: str) -> int:
    """Groups of the axis that work beside each other in one step; those of other stages come after them."""
    groups = sum(group[0] in layout.replica_ranks(0) for group in layout.groups(axis))
    return groups if axis == "pp" else max(1, groups // layout.pp)


def _often(run: Run, found: Crossings | None, card: AxisCard, beside: int) -> str:
    expected = sum(op.count for op in card.ops)
    if found is None:
        return f"never ({expected})"
    steps = sum(phase_of(step) == found.phase for step in run.step_records)
    mean = sum(op.count * op.bytes_each for op in card.ops) / expected if expected else 0.0
    times = f"{beside} × {expected}" if beside > 1 else f"{expected}"
    return f"{found.num / steps:.3g} of {_size(found.bytes_each)} ({times} of {_size(mean)})"


def _change(change: Improvement) -> str:
    name = _NAMES.get(change.quantity, change.quantity)
    if change.quantity.endswith("_bytes"):
        return f"{name}: {_size(change.without)} → {_size(change.with_axis)}"
    if change.quantity == "step_flops":
        return f"{name}: {change.without / 1e6:.3g} → {change.with_axis / 1e6:.3g} million"
    return f"{name}: {change.without:,} → {change.with_axis:,}"


def _size(num_bytes: float) -> str:
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def _lines(words: Iterable[str]) -> str:
    return "; ".join(words) or NOTHING
