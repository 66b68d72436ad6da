"""Recorded steps as samples of cost: what each had to do, how long it took, and who else was at work meanwhile.

A step's time runs from the engine's plan to its ids, and the engine's turn before it is added where the step before it
had just ended. In a pipeline several steps are under way: each stage has its own time then, without the wait for the
stage in front.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from labkit.layout import Layout
from labkit.measure.records import StepRecord
from labkit.plan.work import StepWork

Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class Sample:
    work: StepWork
    start_ns: int
    seconds: tuple[float, ...]
    """By stage. With one stage: the whole step, the engine's turn before it included."""
    company: tuple[float, ...]
    """By stage: the share of its time in which other replicas (or stages) were at work, 0 to 1."""
    whole_s: float
    """From plan to ids."""
    crossing_s: float
    """Wait and transfer on that rank of the last stage which waited least: the others wait for it."""


def work_of(step: StepRecord) -> StepWork:
    """What a recorded step had to do. A model with sliding windows counts as if it had none."""
    decode_context = step.context_tokens - step.prefill_context + step.num_decode_seqs
    return StepWork(
        prefill_tokens=step.prefill_tokens,
        prefill_seqs=step.num_prefill_seqs,
        prefill_pairs=step.prefill_pairs,
        prefill_window_pairs=step.prefill_pairs,
        prefill_context=step.prefill_context,
        decodes=step.num_decode_seqs,
        decode_context=decode_context,
        decode_window_context=decode_context,
        logits=step.num_sampled,
    )


def samples_of(steps: Sequence[StepRecord], layout: Layout) -> list[Sample]:
    """In order of time. Steps whose record lacks what the fit needs (older ones) are left out."""
    usable = sorted((step for step in steps if _is_usable(step)), key=lambda step: step.start_ns)
    turns, typical_ns = _turns(usable, layout)
    busy = _busy(usable, layout)
    return [_sample(step, layout, turns.get(step.step_id, typical_ns), busy) for step in usable]


def _is_usable(step: StepRecord) -> bool:
    has_work = step.prefill_tokens + step.num_decode_seqs > 0
    return has_work and step.end_ns > step.start_ns and bool(step.prefill_pairs) == bool(step.prefill_tokens)


def _turns(steps: Sequence[StepRecord], layout: Layout) -> tuple[dict[int, int], int]:
    """By step, the engine's turn before it in ns, where nothing else lay between; and the usual one."""
    if layout.pp > 1:
        return {}, 0
    found: dict[int, int] = {}
    last: dict[int, StepRecord] = {}
    for step in steps:
        before = last.get(step.replica)
        last[step.replica] = step
        went_on = step.num_decode_seqs or step.prefill_context  # else it may have waited for a request
        if before is not None and went_on and step.start_ns >= before.end_ns:
            found[step.step_id] = step.start_ns - before.end_ns
    return found, int(np.median(list(found.values()))) if found else 0


def _stage_ranks(step: StepRecord, layout: Layout, stage: int) -> list[int]:
    """Positions, in the step's lists, of the ranks of a stage. Ranks of a replica stand in the order of the grid."""
    return [at for at in range(len(step.ranks)) if layout.coords(at % layout.ranks_per_replica).pp == stage]


def _stage_span(step: StepRecord, layout: Layout, stage: int) -> tuple[int, int]:
    """When a stage's slowest rank began (its wait for the stage in front left out) and ended."""
    if layout.pp == 1:
        return step.start_ns, step.end_ns
    ranks = _stage_ranks(step, layout, stage)
    end_ns = max(step.rank_end_ns[at] for at in ranks)
    return end_ns - max(_own_ns(step, at) for at in ranks), end_ns


def _own_ns(step: StepRecord, at: int) -> int:
    return step.rank_end_ns[at] - step.rank_start_ns[at] - (step.idle_ns[at] if step.idle_ns else 0)


def _busy(steps: Iterable[StepRecord], layout: Layout) -> dict[tuple[int, int], Spans]:
    """When each (replica, stage) was at work, in order of time."""
    found: dict[tuple[int, int], Spans] = {}
    for step in steps:
        for stage in range(layout.pp):
            found.setdefault((step.replica, stage), []).append(_stage_span(step, layout, stage))
    return {place: sorted(spans) for place, spans in found.items()}


def _sample(step: StepRecord, layout: Layout, turn_ns: int, busy: dict[tuple[int, int], Spans]) -> Sample:
    spans = [_stage_span(step, layout, stage) for stage in range(layout.pp)]
    places = layout.dp * layout.pp - 1
    company = tuple(
        _company(span, [busy[place] for place in busy if place != (step.replica, stage)], places)
        for stage, span in enumerate(spans)
    )
    last = _stage_ranks(step, layout, layout.pp - 1)
    return Sample(
        work=work_of(step),
        start_ns=step.start_ns,
        seconds=tuple((end - start + turn_ns) / 1e9 for start, end in spans),
        company=company,
        whole_s=(step.end_ns - step.start_ns) / 1e9,
        crossing_s=min((step.wait_ns[at] + step.transfer_ns[at] for at in last), default=0) / 1e9,
    )


def _company(span: tuple[int, int], others: Sequence[Spans], places: int) -> float:
    if not places or span[1] <= span[0]:
        return 0.0
    shared = sum(overlap_ns(span, spans) for spans in others)
    return min(1.0, shared / (span[1] - span[0]) / places)


def overlap_ns(span: tuple[int, int], spans: Spans) -> int:
    """How long `span` has one of `spans` beside it; they are sorted and do not overlap each other."""
    start, end = span
    at = max(0, bisect_left(spans, (start, start)) - 1)
    total = 0
    for other_start, other_end in spans[at:]:
        if other_start >= end:
            break
        total += max(0, min(end, other_end) - max(start, other_start))
    return total


def pipeline_times(steps: Sequence[StepRecord], layout: Layout) -> tuple[float, float]:
    """(hops, turnaround) in seconds: what a step that was alone took beyond its stages' own time, with the engine's
    turn before the next; and how long a first stage pauses before a step that waits for it. Medians; 0 without a
    pipeline. Hops may come out below 0: the last stage prepares itself while the first computes."""
    if layout.pp == 1:
        return 0.0, 0.0
    ordered = sorted((step for step in steps if _is_usable(step)), key=lambda step: step.start_ns)
    hops, turns = [], []
    for before, step, after in zip(ordered, ordered[1:], ordered[2:], strict=False):
        if before.end_ns <= step.start_ns and after.start_ns >= step.end_ns:
            spans = [_stage_span(step, layout, stage) for stage in range(layout.pp)]
            if after.num_decode_seqs:
                hops.append(after.start_ns - step.start_ns - sum(end - start for start, end in spans))
        own, theirs = _stage_span(step, layout, 0), _stage_span(before, layout, 0)
        if step.start_ns < theirs[1] <= own[0] and step.replica == before.replica:
            turns.append(own[0] - theirs[1])
    return _median_s(hops), _median_s(turns)


def _median_s(values: Sequence[int]) -> float:
    return float(np.median(values)) / 1e9 if values else 0.0
