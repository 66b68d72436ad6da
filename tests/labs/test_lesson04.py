"""Lesson 04: its merge is the engine's, and what it reads off runs is right on rows whose answer can be seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from labkit.lab.run import Run
from labkit.layout import Layout, check_layout, zigzag
from labkit.measure.breakdown import phase_of
from labkit.measure.records import RequestRecord, StepRecord
from labkit.model.spec import load_spec
from labkit.parallel.partial import Partial, merge_partials
from labkit.teach import lesson04
from labkit.teach.reference import ReferenceCase

MS = 1_000_000
CUTS = [(6,), (1, 5), (0, 7), (3, 3, 9), (12,)]


# ---- the merge


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("cuts", CUTS)
def test_the_merge_by_hand_is_attention_that_was_never_split(cuts: tuple[int, ...], scale: float):
    scores, values = lesson04.make_scores(1, scale)
    shares = lesson04.split(scores, values, *cuts)
    assert np.allclose(lesson04.merge(shares), lesson04.attend(scores, values), rtol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("cuts", CUTS)
def test_the_engines_merge_of_the_same_shares_is_the_same(cuts: tuple[int, ...], scale: float):
    scores, values = lesson04.make_scores(2, scale)
    scores[0] = -np.inf
    shares = lesson04.split(scores, values, *cuts)
    partials = [
        Partial(*(torch.tensor(part, dtype=torch.float32) for part in (weighted, maximum, total)))
        for maximum, total, weighted in shares
    ]
    got = merge_partials(partials).finish().numpy()
    assert np.allclose(got, lesson04.merge(shares), atol=1e-5) and not got[0].any()


# ---- TTFT by length


def request(index: int, prompt: int, ttft: float, status: str = "completed") -> RequestRecord:
    return RequestRecord(
        request_id=f"r-{index}", index=index, status=status, scheduled_ns=0, sent_ns=0, first_ns=round(ttft * MS),
        last_ns=round(ttft * MS), prompt_tokens=prompt, n=1,
    )  # fmt: skip


def timed(points: dict[int, float]) -> Run:
    """Three requests of each length around its median."""
    rows = [request(i, n, ttft + off) for n, ttft in points.items() for i, off in enumerate((-1.0, 0.0, 1.0))]
    return Run("r", {}, [*rows, request(9, 64, 500.0, "failed")])


@pytest.mark.parametrize(
    ("challenger", "found"),
    [
        ({100: 20.0, 200: 30.0, 400: 30.0}, 300.0),
        ({100: 5.0, 200: 15.0, 400: 30.0}, "below 100"),
        ({100: 20.0, 200: 30.0, 400: 50.0}, lesson04.NOT_FOUND),
        ({100: 5.0, 200: 30.0, 400: 50.0}, lesson04.NOT_FOUND),
        ({100: 5.0, 200: 30.0, 400: 30.0}, 300.0),
        ({800: 1.0}, lesson04.NOT_FOUND),
    ],
)
def test_the_crossing_lies_between_two_lengths_or_is_not_found(challenger: dict[int, float], found: float | str):
    """Against 10, 20 and 40 ms; one that is sooner for short prompts only has not crossed."""
    incumbent = timed({100: 10.0, 200: 20.0, 400: 40.0})
    assert lesson04.crossover(timed(challenger), incumbent) == found


def test_lengths_are_told_apart_and_failures_left_out():
    run = timed({256: 20.0, 32: 10.0})
    assert lesson04.ttft_by_length(run) == {32: [9.0, 10.0, 11.0], 256: [19.0, 20.0, 21.0]}
    assert lesson04.least_n(run) == 3 and lesson04.least_n(Run("r", {}, [])) == 0


# ---- what crossed


def step(number: int, prefill: int, decodes: int, query_keys: list[int] | None = None) -> StepRecord:
    return StepRecord(
        run_id="r", epoch=1, step_id=number, replica=0, layout="", start_ns=0, end_ns=1, num_prefill_seqs=prefill > 0,
        num_decode_seqs=decodes, prefill_tokens=prefill, context_tokens=10 * decodes, ranks=[0, 1],
        rank_start_ns=[0, 0], rank_end_ns=[1, 1], compute_ns=[1, 1], wait_ns=[0, 0], transfer_ns=[0, 0],
        collective_bytes=0, num_collectives=0, query_keys=query_keys or [],
    )  # fmt: skip


def recorded(layout: str, steps: list[StepRecord], rows: list[tuple[int, str, str, int]]) -> Run:
    """rows: (step, axis, operation, bytes), alike on both ranks."""
    run = Run("r", {"layout": layout}, [], steps)
    phases = {each.step_id: phase_of(each) for each in steps}
    both = [(*row, 1, 0, seq, phases[row[0]], rank) for seq, row in enumerate(rows) for rank in (0, 1)]
    columns = ["step_id", "axis", "op", "bytes", "epoch", "group_id", "seq", "phase", "rank"]
    run.__dict__["collectives"] = pd.DataFrame(both, columns=columns)
    return run


def shared_rows() -> Run:
    """TP2+sp of lab-30m: a prompt of 64 (32 rows a rank) and a smaller one, and a decode, padded to a row a rank."""
    row, steps = 512 * 4, [step(0, 64, 0), step(1, 8, 0), step(2, 0, 1)]
    sums = [("reduce_scatter", 64 * row), ("all_gather", 32 * row)]
    rows: list[tuple[int, str, str, int]] = [(0, "tp", op, size) for op, size in sums for _ in range(17)]
    rows += [(0, "tp", "gather", 4096 * 4), (1, "tp", "all_gather", 4 * row), (0, "tp", "recv", 9)]
    rows += [(2, "tp", op, size * row) for op, size in (("reduce_scatter", 2), ("all_gather", 1)) for _ in range(17)]
    return recorded("tp2+sp", steps, rows)


def test_operations_are_those_of_the_largest_steps():
    run = shared_rows()
    found = {op.op: (op.per_step, op.bytes_each) for op in lesson04.operations(run, "prefill", "tp")}
    assert found == {"reduce_scatter": (17, 131072), "all_gather": (17, 65536), "gather": (1, 16384)}
    assert lesson04.sent_bytes(run, "prefill", "tp") == 2 * 17 * 65536, "half of the rows, twice"
    assert lesson04.per_step(run, "decode", "tp") == 34
    assert lesson04.per_step(run, "prefill", "tp") == lesson04.expected(ReferenceCase(), run, "prefill", "tp") == 35
    rows = lesson04.traffic_table({"TP2+sp": run}, "prefill", "tp").rows
    assert [row[1:4] for row in rows] == [["all_gather", "17", "65,536 B"], ["reduce_scatter", "17", "131,072 B"]]
    assert rows[0][4] == "2,176.0 KiB"
    with pytest.raises(ValueError, match="no pure decode step"):
        lesson04.largest_steps(recorded("tp2", [step(0, 8, 0)], []), "decode")


def test_in_a_ring_each_rank_sends_and_the_table_counts_one():
    run = recorded("pcp2+ring", [step(0, 64, 0)], [(0, "pcp", "send", 4096)] * 8)
    (row,) = lesson04.traffic_table({"x": run}, "prefill", "pcp").rows
    assert row == ["x", "send", "8", "4,096 B", "32.0 KiB"]
    assert lesson04.per_step(run, "prefill", "pcp") == lesson04.expected(ReferenceCase(), run, "prefill", "pcp") == 8


def test_balance_is_told_as_planned_and_as_recorded():
    rows = lesson04.balance_table(recorded("pcp2", [step(0, 64, 0, [1040, 1040])], [])).rows
    assert rows[0][1:3] == [f"{32 * 33 // 2:,}", f"{64 * 65 // 2 - 32 * 33 // 2:,}"]
    assert rows[1][1:] == rows[2][1:] == ["1,040", "1,040", "100.0%"]


# ---- whose queries, whose heads


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_the_early_and_the_late_part_are_what_the_engine_computes(num_ranks: int):
    for rank in range(num_ranks):
        assert lesson04.queries_of(24 * num_ranks, num_ranks, rank) == zigzag(24 * num_ranks, num_ranks, rank)


def test_a_model_with_few_kv_heads_differs_in_nothing_else(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    folder = lesson04.few_kv_heads("lab-30m")
    few, whole = load_spec(folder), load_spec("lab-30m")
    assert few.num_kv_heads == 1 and few.num_layers == whole.num_layers and few.hidden_size == whole.hidden_size
    assert check_layout(Layout(tp=2, dcp=2), few) and not check_layout(Layout(tp=2, dcp=2), whole)
    rows = lesson04.copies_table(folder, ("tp2", "tp2xdcp2", "tp3")).rows
    assert rows[0][1] == "rank 0: head 0; rank 1: head 0" and rows[2][1] == "refused"
    assert int(rows[0][2].split()[0].replace(",", "")) == 2 * int(rows[1][2].split()[0].replace(",", ""))
