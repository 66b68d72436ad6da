"""Crossings are operations, not rows: one a collective whatever its ranks, one a message where it was sent."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from labkit.measure.crossings import Crossings, crossings
from labkit.measure.records import StepRecord

MS = 1_000_000


def row(
    axis: str, op: str, num_bytes: int, rank: int, seq: int, phase: str = "decode", group: int = 0
) -> dict[str, Any]:
    return {"epoch": 1, "step_id": seq, "rank": rank, "group_id": group, "seq": seq, "op": op, "axis": axis,
            "phase": phase, "bytes": num_bytes}  # fmt: skip


def step(start_ms: int, end_ms: int, prefill_tokens: int = 0, decode_seqs: int = 0, replica: int = 0) -> StepRecord:
    return StepRecord(
        run_id="r", epoch=1, step_id=start_ms, replica=replica, layout="tp2", start_ns=start_ms * MS,
        end_ns=end_ms * MS, num_prefill_seqs=int(prefill_tokens > 0), num_decode_seqs=decode_seqs,
        prefill_tokens=prefill_tokens, context_tokens=0, ranks=[0, 1], rank_start_ns=[0, 0], rank_end_ns=[0, 0],
        compute_ns=[0, 0], wait_ns=[0, 0], transfer_ns=[0, 0], collective_bytes=0, num_collectives=0,
    )  # fmt: skip


STEPS = [step(0, 40, prefill_tokens=100), step(40, 50, decode_seqs=2), step(60, 70, decode_seqs=2)]


def only(rows: list[dict[str, Any]], steps: list[StepRecord] = STEPS) -> Crossings:
    (found,) = crossings(pd.DataFrame(rows), steps)
    return found


def test_a_collective_counts_once_and_not_once_a_rank():
    rows = [row("tp", "all_reduce", 1024, rank, seq) for rank in (0, 1) for seq in range(3)]
    found = only(rows)
    assert (found.num, found.bytes_each, found.num_tokens) == (3, 1024.0, 4)
    assert found.num_per("token") == 0.75 and found.num_per("second") == pytest.approx(3 / 0.020)


def test_what_one_rank_gives_is_the_mean_over_the_ranks():
    found = only([row("ep", "all_to_all", 0, 0, 7), row("ep", "all_to_all", 300, 1, 7)])
    assert (found.num, found.bytes_each) == (1, 150.0)


def test_a_message_counts_where_it_was_sent_and_waiting_for_it_is_none():
    rows = [row("pp", "send", 512, 0, 1), row("pp", "send", 0, 0, 1), row("pp", "recv", 512, 2, 1)]
    assert only(rows).num == 1 and only(rows).num_bytes == 512


def test_groups_with_the_same_numbers_are_told_apart_and_barriers_carry_nothing():
    rows = [row("tp", "all_reduce", 8, 0, 1, group=g) for g in (0, 1)] + [row("tp", "barrier", 0, 0, 2)]
    assert only(rows).num == 2


def test_phases_have_their_own_tokens_and_the_order_is_that_of_the_axes():
    rows = [row("pp", "send", 1, 0, 1), row("tp", "gather", 1, 0, 1), row("tp", "gather", 1, 0, 2, "prefill")]
    found = crossings(pd.DataFrame(rows), STEPS)
    assert [(each.axis, each.phase) for each in found] == [("tp", "prefill"), ("tp", "decode"), ("pp", "decode")]
    assert [each.num_tokens for each in found] == [100, 4, 4]


def test_seconds_are_those_of_the_clock_where_replicas_work_at_once():
    steps = [step(0, 30, decode_seqs=1), step(10, 40, decode_seqs=1, replica=1)]
    assert only([row("tp", "all_reduce", 4, 0, 1)], steps).seconds == pytest.approx(0.040)


def test_another_unit_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match="per token or per second, not per 'step'"):
        only([row("tp", "all_reduce", 4, 0, 1)]).num_per("step")


def test_operations_can_be_told_apart_and_steps_of_two_replicas_share_one():
    """Two exchanges of an ep group whose ranks are two replicas, each with its own step; a gather of one of them."""
    rows = [row("ep", "all_to_all", 8, rank, seq) | {"step_id": rank} for rank in (0, 1) for seq in (1, 2)]
    rows.append(row("ep", "gather", 64, 0, 3) | {"step_id": 0})
    steps = [step(0, 30, decode_seqs=1), step(10, 40, decode_seqs=1, replica=1)]
    assert (only(rows, steps).num, only(rows, steps).per_step) == (3, 2.5)
    found = crossings(pd.DataFrame(rows), steps, by_op=True)
    assert [(each.op, each.num, each.per_step) for each in found] == [("all_to_all", 2, 2.0), ("gather", 1, 0.5)]
