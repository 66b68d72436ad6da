"""Lesson 05: what it reads off recorded steps, its arithmetic, and its second exercise."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from notebooks import LABS, exercises
from test_solutions import outcome

from labkit.lab.run import Run
from labkit.layout import Layout, rank_loads
from labkit.measure.records import StepRecord
from labkit.server.client import ServerError
from labkit.teach import lesson05, own_server
from labkit.teach.expert_exercises import SPREAD_CASES
from labkit.teach.lesson05 import Answer
from labkit.teach.reference import MIB, ReferenceCase

CASE = ReferenceCase("lab-moe-8x")
H, LAYERS = 256, 4
THERE, BACK = (H + 1) * 4, H * 4


def moe_step(index: int, replica: int, tokens: list[int], rows: int, sent: int, prompt: int, dropped: int = 0) -> Any:
    """A step of a replica of one rank; tokens by expert, of all layers together."""
    return StepRecord(
        run_id="r", epoch=1, step_id=2 * index + replica, replica=replica, layout="dp2xep2", start_ns=0, end_ns=1,
        num_prefill_seqs=int(prompt > 0), num_decode_seqs=int(prompt == 0), prefill_tokens=prompt, context_tokens=0,
        ranks=[replica], rank_start_ns=[0], rank_end_ns=[0], compute_ns=[0], wait_ns=[0], transfer_ns=[0],
        collective_bytes=0, num_collectives=8, expert_tokens=tokens, expert_rows=[rows], expert_sent_bytes=[sent],
        expert_ns=[1], expert_wait_ns=[2 - replica], num_dropped=dropped,
    )  # fmt: skip


def skewed_run() -> Run:
    """Two replicas with a prompt of 4 tokens each (4 · 2 · 4 = 32 rows): 24 of either ask for rank 0's experts."""
    tokens = [12, 6, 6, 0, 8, 0, 0, 0]
    steps = [
        moe_step(0, 0, tokens, 48, 8 * THERE + 24 * BACK, 4, 7),
        moe_step(0, 1, tokens, 16, 24 * THERE + 8 * BACK, 4, 7),
    ]
    memory = [{"rank": r, "weights": 0, "weights_by_part": {"experts": 12 * MIB, "router": 32768}} for r in (0, 1)]
    run = Run("r", {"layout": "dp2xep2", "memory_bytes": memory}, [], steps)
    handed = [
        (rank, op, size) for rank, rows in ((0, 48), (1, 16)) for op, size in (("t", 32 * THERE), ("b", rows * BACK))
    ]
    run.__dict__["collectives"] = pd.DataFrame(
        [
            {"axis": "ep", "op": "all_to_all", "rank": rank, "step_id": rank, "bytes": size // LAYERS}
            for rank, _, size in handed
            for _ in range(LAYERS)
        ]
    )
    return run


def test_rows_are_told_apart_by_the_way_that_they_went() -> None:
    rows = lesson05.directions_table(CASE, {"x": skewed_run()}).rows
    assert [row[2:6] for row in rows] == [["32", "48", "8", "24"], ["32", "16", "24", "8"]]


def test_bytes_by_token_count_what_leaves_a_rank() -> None:
    run = skewed_run()
    assert lesson05.left_per_token(run) == lesson05.per_token(run) == (32 * THERE + 32 * BACK) / 8
    ((label, axis, op, times, handed, left),) = lesson05.crossings_table({"x": run}).rows
    assert (label, axis, op, times) == ("x", "ep", "all_to_all", "8")
    assert handed == f"{(64 * THERE + 64 * BACK) / 2 / 1024:.1f} KiB" and left.endswith("KiB")
    assert lesson05.uniform_bytes(CASE, "dp2xep2") == LAYERS * 2 * (THERE + BACK) / 2


def test_ep_holds_half_of_the_experts_as_tp_does() -> None:
    rows = {row[0]: row for row in lesson05.who_has_what(CASE, "dp2", "tp2", "tp2xep2", "dp2xep2").rows}
    assert [rows[name][2] for name in ("DP2", "TP2", "TP2×EP2", "DP2×EP2")] == ["24 MiB", "12 MiB", "12 MiB", "12 MiB"]
    assert rows["TP2"][1] == "8, 1/2 of each" and rows["DP2×EP2"][1] == "4 whole"
    assert "attention-DP" in rows["DP2×EP2"][3] and "inside" in rows["TP2×EP2"][3]
    assert [row[:2] for row in lesson05.degrees_table(2, 2).rows] == [
        ["1", "DP2×TP2"], ["2", "DP2×TP2×EP2"], ["4", "DP2×TP2×EP4"],
    ]  # fmt: skip


def test_one_rank_is_too_little_for_two_copies_and_enough_for_shared_experts() -> None:
    assert CASE.weights_bytes("dp2") > CASE.budget_bytes > CASE.weights_bytes("dp2xep2")
    roomy = 2 * CASE.budget_bytes
    assert (roomy - CASE.weights_bytes("dp2") - 2 * MIB) // CASE.kv_bytes_per_token("dp2") > 2000


def test_the_least_number_of_drops_is_what_no_order_of_steps_can_avoid() -> None:
    """Room for 4 layers · 2 steps · ⌈4 · 2 ÷ 8⌉ = 8 choices of an expert; four are asked 24, 12, 12 and 16 times."""
    assert lesson05.least_drops(CASE, skewed_run(), 1.0) == 16 + 4 + 4 + 8
    assert lesson05.least_drops(CASE, skewed_run(), 2.0) == 8
    assert lesson05.least_drops(CASE, skewed_run(), 8.0) == 0


def test_answers_part_where_they_differ() -> None:
    table = lesson05.answers_table(
        {"a": Answer([5, 6, 7], 96, 0), "b": Answer([5, 6, 7], 96, 0), "c": Answer([5, 9, 7], 96, 9)}
    )
    assert [row[2:] for row in table.rows] == [["5 6 7", ""], ["5 6 7", "all the same"], ["5 │ 9 7", "parts after 1"]]
    assert table.rows[2][1] == "9 of 96"
    assert lesson05.first_difference([1, 2], [1, 2, 3]) == 2


def test_the_placement_table_is_the_servers_own() -> None:
    experts = {
        "layers": [1], "placements": [[[0, 3], [1, 2]]], "imbalance": [1.25], "plain_imbalance": [1.75],
    }  # fmt: skip
    assert lesson05.placement_table({"experts": experts}).rows == [["1", "0 3", "1 2", "1.75", "1.25"]]


# ---- the exercises


def test_the_exchanges_bytes_are_those_that_the_engine_counts() -> None:
    """The routing of tests/parallel/test_expert.py, whose ranks sent 3 rows, 6 outputs, and 5 rows with 2 outputs."""
    source, expert = [0] * 6 + [2] * 5, [0, 0, 1, 2, 4, 4, 2, 2, 2, 2, 3]
    sent = lesson05.sent_bytes(source, expert, [0, 0, 1, 1, 2], 3, 6, 4)
    assert sent.sum(axis=1).tolist() == [3 * 28, 6 * 24, 5 * 28 + 2 * 24]


@pytest.mark.parametrize(("load", "num_ranks", "why"), SPREAD_CASES)
def test_no_placement_is_better_than_what_the_check_expects(load: tuple[int, ...], num_ranks: int, why: str) -> None:
    """So that a reader's better answer is never refused: all ways to deal out the experts evenly."""
    everyone, each = range(len(load)), len(load) // num_ranks

    def ways(left: tuple[int, ...]) -> Any:
        if not left:
            yield ()
            return
        for rest in itertools.combinations(left[1:], each - 1):
            mine = (left[0], *rest)
            yield from ((mine, *others) for others in ways(tuple(e for e in left if e not in mine)))

    best = min(max(rank_loads(placed, load)) for placed in ways(tuple(everyone)))
    found = max(rank_loads(tuple(map(tuple, lesson05.spread(load, num_ranks))), load))
    assert found == best, why


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("lambda load, n: [list(range(r * len(load) // n, (r + 1) * len(load) // n)) for r in range(n)]", "300"),
        ("lambda load, n: [list(range(r, len(load), n)) for r in range(n)]", "✕"),
        ("lambda load, n: [[e] for e in range(n)]", "no rank owns expert"),
        ("lambda load, n: [list(range(len(load)))] * n", "stands twice"),
        ("lambda load, n: [[max(range(len(load)), key=load.__getitem__)], "
         "[e for e in range(len(load)) if e != max(range(len(load)), key=load.__getitem__)]][:n] + [[]] * (n - 2)",
         "there is memory for"),
    ],
)  # fmt: skip
def test_a_likely_mistake_in_the_placement_is_caught(mistake: str, words: str) -> None:
    path = next(path for path in LABS if path.stem.startswith("05"))
    _, check, _ = exercises(path)[1]
    found = outcome(path, f"spread = {mistake}", check)
    assert not found and words in repr(found)


# ---- a server of its own


@pytest.mark.engine
@pytest.mark.slow
def test_another_model_gets_a_server_of_its_own_and_the_labs_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LABKIT_RUNTIME", str(tmp_path))
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))
    first, told = own_server.lab_for({"model": "lab-5m", "ranks": 1, "memory_per_rank": "64MiB"})
    assert told == ""
    try:
        wanted = {"model": "lab-moe-8x", "ranks": 1, "memory_per_rank": "64MiB"}
        own, told = own_server.lab_for(wanted)
        assert told == "lab-5m" and own.url != first.url and own.state()["model"] == "lab-moe-8x"
        again, _ = own_server.lab_for(wanted)
        assert again.url == own.url, "a first cell that is run again finds its server again"
        assert own_server.lab_for({"model": "lab-5m", "ranks": 1})[0].url == first.url, "it stays the one that is found"
        own.wait_ready()
        killed = tmp_path / "labkit" / "own-999999999-x"
        killed.mkdir()
        own_server._sweep()
        (mine,) = (tmp_path / "labkit").glob("own-*")
        own_server.end_own_servers()
        assert not mine.exists() and not killed.exists()
        assert first.client.health() in ("starting", "ready")
        with pytest.raises(ServerError):
            own.client.health()
    finally:
        own_server.end_own_servers()
        first.client.shutdown()


def test_attention_is_told_by_the_degree() -> None:
    told = {
        slug: lesson05.attention_of(Layout.parse(slug)) for slug in ("tp2xep2", "dp2xep2", "dp2xtp2xep4", "dp2", "tp4")
    }
    assert "inside" in told["tp2xep2"] and "by tp 2 (attention-DP)" in told["dp2xtp2xep4"]
    assert told["dp2"] == "each replica its own requests" and told["tp4"] == "by tp"
