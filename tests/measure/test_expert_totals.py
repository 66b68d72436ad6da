"""Sums over the steps of a run: exact, by rank and by expert, and a sentence where no step tells."""

from __future__ import annotations

import pytest

from labkit.measure.expert_totals import expert_totals
from labkit.measure.records import StepRecord


def step(
    ranks: list[int], tokens: list[int], rows: list[int], prompt: int, decodes: int, dropped: int = 0
) -> StepRecord:
    n = len(ranks)
    return StepRecord(
        run_id="r", epoch=1, step_id=0, replica=0, layout="tp2xep2", start_ns=0, end_ns=1, num_prefill_seqs=1,
        num_decode_seqs=decodes, prefill_tokens=prompt, context_tokens=0, ranks=ranks, rank_start_ns=[0] * n,
        rank_end_ns=[1] * n, compute_ns=[1] * n, wait_ns=[0] * n, transfer_ns=[0] * n, collective_bytes=0,
        num_collectives=0, expert_tokens=tokens, expert_rows=rows, expert_sent_bytes=[100 + rank for rank in ranks],
        expert_ns=[10] * n, expert_wait_ns=[5 * rank for rank in ranks], num_dropped=dropped,
    )  # fmt: skip


def test_steps_of_one_replica_and_of_two_add_up_by_rank() -> None:
    together = [step([0, 1], [6, 2, 0, 0], [8, 0], 3, 1, 2), step([0, 1], [1, 3, 2, 2], [4, 4], 0, 4)]
    found = expert_totals(together)
    assert found.tokens == [7, 5, 2, 2] and found.rows == {0: 12, 1: 4}
    assert (found.num_tokens, found.num_steps, found.num_dropped) == (8, 2, 2)
    assert found.unevenness == 1.5 and found.busiest_rank == 0 and found.busiest_expert == 0
    assert found.dropped_share == 2 / 16 and found.sent_bytes_per_token == (200 + 202) / 8
    assert found.wait_ns == {0: 0, 1: 10} and found.time_ns == {0: 20, 1: 20}
    apart = expert_totals([step([1], [0, 0, 4, 4], [8], 4, 0), step([0], [8, 0, 0, 0], [8], 4, 0)])
    assert list(apart.rows) == [0, 1] and apart.unevenness == 1


def test_a_step_without_tokens_takes_part_with_what_it_computed_for_others() -> None:
    found = expert_totals([step([0], [8, 0, 0, 0], [2], 4, 0), step([1], [0, 0, 0, 0], [6], 0, 0)])
    assert found.rows == {0: 2, 1: 6} and found.num_tokens == 4 and found.unevenness == 1.5


def test_a_run_without_experts_is_a_sentence() -> None:
    dense = step([0], [], [], 4, 0)
    with pytest.raises(ValueError, match=r"tells of experts.*record=False"):
        expert_totals([dense])
