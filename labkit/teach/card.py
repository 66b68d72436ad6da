"""The five questions of every axis that a layout uses, answered with a run's own bytes and counts.

What is measured (bytes of weights on the ranks, crossings and their bytes) stands beside what the layout's arithmetic
says of the very steps that the run took; what no run can show, such as the layout without the axis, is predicted.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from labkit.lab import Run
from labkit.layout import AxisCard, Improvement, Layout, StepShape, step_card
from labkit.layout.traffic import axis_traffic
from labkit.measure.breakdown import phase_of
from labkit.measure.crossings import Crossings, crossings
from labkit.measure.records import StepRecord
from labkit.teach.html import Table
from labkit.teach.readings import at_once
from labkit.teach.reference import ReferenceCase

PHASES = ("prefill", "decode")
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
_REMARK = (
    "Weights and crossings are measured here, with the arithmetic's own figure in brackets; the layout without the "
    "axis, and what it improves, are predicted. Bytes of a crossing are the mean over the ranks of its group: a single "
    "token is with one rank of those that share it out, and logits are gathered in one group only."
)


def five_questions(case: ReferenceCase, run: Run) -> Table:
    """A column an axis. Raises ValueError for a layout of one rank, which has no axis, and for a run without steps."""
    layout, steps = Layout.parse(run.summary["layout"]), _steps(run)
    if layout.world_size == 1:
        raise ValueError(f"{layout} uses no axis, so there is nothing to ask about it.")
    if not steps:
        raise ValueError(f"Run {run.run_id} has no pure prefill or decode step: was it recorded? Keep fewer in flight.")
    shapes = {phase: _typical(mine) for phase, mine in steps.items()}
    cards = {phase: step_card(layout, case.spec, shape, case.dtype_bytes) for phase, shape in shapes.items()}
    measured = [each for mine in steps.values() for each in _crossings(run, mine)]
    columns = {}
    for of_axis in zip(*cards.values(), strict=True):
        by_phase = dict(zip(cards, of_axis, strict=True))
        often = [
            [f"how often, in a {phase} step", _often(layout, case, mine, measured, by_phase[phase])]
            for phase, mine in steps.items()
        ]
        columns[f"{of_axis[0].axis.upper()}{of_axis[0].degree}"] = _answers(run, by_phase, often)
    rows = [[many[0][0], *(answer for _, answer in many)] for many in zip(*columns.values(), strict=True)]
    if set(rows[-1][1:]) == {NOTHING}:  # the question that only some layouts raise
        rows.pop()
    return Table(f"{layout}: five questions, by axis", ["", *columns], rows, [_told(shapes), _REMARK])


def _steps(run: Run) -> dict[str, list[StepRecord]]:
    """The pure steps of each phase that the run had; a replica's turns without a request of its own left out."""
    busy = [step for step in run.step_records if step.prefill_tokens + step.num_decode_seqs]
    found = {phase: [step for step in busy if phase_of(step) == phase] for phase in PHASES}
    return {phase: steps for phase, steps in found.items() if steps}


def _typical(steps: Sequence[StepRecord]) -> StepShape:
    """The median step of a phase."""
    if not steps[0].num_decode_seqs:
        return StepShape(prefill_tokens=round(statistics.median(step.prefill_tokens for step in steps)))
    seqs = statistics.median(step.num_decode_seqs for step in steps)
    context = statistics.median(step.context_tokens / step.num_decode_seqs for step in steps)
    return StepShape(decode_seqs=round(seqs), context_tokens=round(context))


def _crossings(run: Run, steps: Sequence[StepRecord]) -> list[Crossings]:
    rows = run.collectives
    if not len(rows):
        return []
    return crossings(rows[rows["step_id"].isin([step.step_id for step in steps])], steps)


def _answers(run: Run, by_phase: Mapping[str, AxisCard], often: list[list[str]]) -> list[list[str]]:
    """(question, answer) of one axis; its parts are those of the last phase, where most KV is kept."""
    card, here = list(by_phase.values())[-1], _mean_parts(run)
    cut = (f"{s.part}: {_size(s.without_bytes)} → {_held(here, s.part, s.with_bytes)}" for s in card.partitioned)
    kept = (f"{s.part}, {s.copies:g} copies" for s in card.replicated)
    return [
        ["what is partitioned", "; ".join(cut) or "no bytes, only work"],
        ["what stays replicated", _lines(kept)],
        ["what crosses", _lines(dict.fromkeys(what for each in by_phase.values() for what in each.crosses))],
        *often,
        ["what it improves", _changes({phase: each.improves for phase, each in by_phase.items()})],
        ["what it costs", _changes({phase: each.costs for phase, each in by_phase.items()})],
    ]


def _mean_parts(run: Run) -> dict[str, float]:
    """Part → measured bytes of it on a rank, on average; a tied head's copy counts as embedding."""
    ranks = [dict(rank["weights_by_part"]) for rank in run.summary["memory_bytes"]]
    for parts in ranks:
        parts["embedding"] = parts.get("embedding", 0) + parts.pop("head", 0)
    return {part: statistics.mean(parts.get(part, 0) for parts in ranks) for part in {p for r in ranks for p in r}}


def _held(measured: Mapping[str, float], part: str, predicted: int) -> str:
    if part not in measured:
        return f"{_size(predicted)} (predicted)"
    return f"{_size(measured[part])} ({_size(predicted)})"


def _often(
    layout: Layout, case: ReferenceCase, steps: Sequence[StepRecord], measured: Sequence[Crossings], card: AxisCard
) -> str:
    count, size = _expected(layout, case, steps, card.axis)
    found = [each for each in measured if (each.axis, each.phase) == (card.axis, phase_of(steps[0]))]
    if not found:
        return f"never ({count:.3g})"
    beside = at_once(layout, card.axis, card.ops[0].operation if card.ops else "")
    times = f"{beside} × {count:.3g}" if beside > 1 else f"{count:.3g}"
    return f"{found[0].per_step:.3g} of {_size(found[0].bytes_each)} ({times} of {_size(size)})"


def _expected(layout: Layout, case: ReferenceCase, steps: Sequence[StepRecord], axis: str) -> tuple[float, float]:
    """By the shapes of just these steps: operations in a step, and the mean bytes of one."""
    num, total = 0, 0
    for (prefill, decode), times in Counter((step.prefill_tokens, step.num_decode_seqs) for step in steps).items():
        for op in axis_traffic(axis, layout, case.spec, StepShape(prefill, decode), case.dtype_bytes):
            num += op.count * times
            total += op.count * op.bytes_each * times
    return num / len(steps), total / num if num else 0.0


def _changes(by_phase: Mapping[str, Sequence[Improvement]]) -> str:
    """Each quantity once; where it is not alike in all phases, with the phase."""
    found: dict[str, dict[str, list[str]]] = {}
    for phase, changes in by_phase.items():
        for change in changes:
            name = _NAMES.get(change.quantity, change.quantity)
            found.setdefault(name, {}).setdefault(_change(change), []).append(phase)
    return _lines(f"{name}: {_by_phase(values, len(by_phase))}" for name, values in found.items())


def _by_phase(values: Mapping[str, Sequence[str]], num_phases: int) -> str:
    return ", ".join(text if len(of) == num_phases else f"{text} ({', '.join(of)})" for text, of in values.items())


def _change(change: Improvement) -> str:
    if change.quantity.endswith("_bytes"):
        return f"{_size(change.without)} → {_size(change.with_axis)}"
    if change.quantity == "step_flops":
        return f"{change.without / 1e6:.3g} → {change.with_axis / 1e6:.3g} million"
    return f"{change.without:,} → {change.with_axis:,}"


def _told(shapes: Mapping[str, StepShape]) -> str:
    words = []
    if shape := shapes.get("prefill"):
        words.append(f"{shape.prefill_tokens} tokens of prompts")
    if shape := shapes.get("decode"):
        many = "s" * (shape.decode_seqs != 1)
        words.append(f"{shape.decode_seqs} sequence{many} of {shape.context_tokens} tokens decoding")
    return f"The typical steps of this run: {', and '.join(words)}. Counts and bytes are means over all such steps."


def _size(num_bytes: float) -> str:
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def _lines(words: Iterable[str]) -> str:
    return "; ".join(words) or NOTHING
