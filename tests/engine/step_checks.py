"""What the records of a run's steps must say, whatever the layout: of stages, of shared positions, of experts."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.layout import Layout
from labkit.measure.breakdown import unaccounted_share
from labkit.measure.records import StepRecord
from labkit.model.spec import ModelSpec


def check_steps(steps: Sequence[StepRecord], spec: ModelSpec, layout: Layout) -> None:
    assert steps
    assert all(unaccounted_share([step]) <= 0.01 for step in steps), "what fills a step is measured, all of it"
    check_stages(steps, layout)
    check_positions(steps, layout)
    if spec.moe is not None:
        check_experts(steps, spec, layout)


def check_stages(steps: Sequence[StepRecord], layout: Layout) -> None:
    """A replica's steps overlap, as many as there are stages and no more, and come back in order."""
    mine = [step for step in steps if step.replica == 0]
    assert [step.step_id for step in mine] == sorted(step.step_id for step in mine)
    assert [step.end_ns for step in mine] == sorted(step.end_ns for step in mine)
    at_once = [sum(other.start_ns <= step.start_ns < other.end_ns for other in mine) for step in mine]
    assert max(at_once) == layout.pp
    if layout.pp == 1:
        return
    for step in mine:
        first = [at for at, rank in enumerate(step.ranks) if layout.coords(rank).pp == 0]
        assert all(step.idle_ns[at] == 0 for at in first), "the first stage waits for nobody"
        assert step.in_flight_bytes > 0 or not num_tokens(step)


def check_positions(steps: Sequence[StepRecord], layout: Layout) -> None:
    """Each step that read prompts says how many keys each pcp rank's queries saw."""
    read = [step.query_keys for step in steps if step.num_prefill_seqs]
    assert read and all(len(keys) == (layout.pcp if layout.pcp > 1 else 0) for keys in read)
    assert all(max(keys) > 0 for keys in read if keys)


def num_tokens(step: StepRecord) -> int:
    return step.prefill_tokens + step.num_decode_seqs


def check_experts(steps: Sequence[StepRecord], spec: ModelSpec, layout: Layout) -> None:
    """Every token goes to top_k experts in each MoE layer, and is told once, wherever its rows are computed."""
    assert spec.moe is not None
    num_moe = sum(spec.is_moe_layer(layer) for layer in range(spec.num_layers))
    for step in steps:
        assert sum(step.expert_tokens) == num_tokens(step) * num_moe * spec.moe.top_k
        assert len(step.expert_ns) == len(step.expert_wait_ns) == len(step.ranks) and step.num_dropped == 0
    decodes = layout.pcp  # each is computed on every pcp rank
    tokens = sum(step.prefill_tokens + decodes * step.num_decode_seqs for step in steps)
    cuts = layout.tp if layout.ep == 1 else 1
    assert sum(sum(step.expert_rows) for step in steps) == tokens * num_moe * spec.moe.top_k * cuts
    sent = sum(sum(step.expert_sent_bytes) for step in steps)
    waited = sum(sum(step.expert_wait_ns) for step in steps)
    assert (sent > 0, waited > 0) == (layout.ep > 1, layout.ep > 1)
    if layout.attention_dp:
        idle = [step for step in steps if not num_tokens(step)]
        assert idle and sum(sum(step.expert_rows) for step in idle) > 0, "who sleeps computes for the others"
