"""Lesson 06 without ranks: who sends what to another node, and what a run's rows say of it."""

from __future__ import annotations

import pandas as pd
import pytest
from test_readings import request, run, step

from labkit.layout import Layout
from labkit.layout.traffic import StepShape, axis_traffic
from labkit.measure.recorder import group_id
from labkit.model.spec import load_spec
from labkit.teach import apart, beside, lesson06, own_server
from labkit.teach.across import bytes_across, node_map, sent_across
from labkit.teach.reference import ReferenceCase

HALVES = [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("op", "rank", "group", "sent"),
    [
        ("send", 0, (0, 4), 800), ("send", 0, (0, 1), 0), ("recv", 4, (0, 4), 0), ("barrier", 0, (0, 4), 0),
        ("all_reduce", 0, (0, 4), 800), ("all_reduce", 3, tuple(range(8)), 1400),
        ("all_reduce", 7, tuple(range(8)), 1400), ("all_reduce", 2, tuple(range(8)), 0),
        ("all_gather", 3, tuple(range(8)), 5600), ("reduce_scatter", 3, tuple(range(8)), 700),
        ("all_to_all", 2, tuple(range(8)), 400), ("gather", 5, tuple(range(8)), 800),
        ("gather", 1, tuple(range(8)), 0),
    ],
)  # fmt: skip
def test_what_a_rank_sends_to_the_other_node(op: str, rank: int, group: tuple[int, ...], sent: float):
    assert sent_across(op, 800, rank, group, HALVES) == sent


def test_recorded_rows_are_looked_up_in_the_groups_of_the_layout():
    layout = Layout.parse("pp2xtp4")
    rows = [("pp", "send", index, rank, 100) for index, rank in enumerate(range(4))]
    rows += [("tp", "all_reduce", layout.index_in("pp", rank), rank, 1000) for rank in range(8)]
    table = pd.DataFrame(
        [
            {"axis": axis, "phase": "decode", "op": op, "group_id": group_id(axis, index), "rank": rank, "bytes": size}
            for axis, op, index, rank, size in rows
        ]
    )
    found = bytes_across(table, layout, HALVES)
    assert found == {("pp", "decode", "send"): 400.0, ("tp", "decode", "all_reduce"): 0.0}


@pytest.mark.parametrize("slug", ["tp8", "pp2xtp4", "pp4xtp2", "dp2xtp4", "pp8"])
def test_the_exercise_agrees_with_the_layouts_own_traffic(slug: str):
    """On two halves every ring has no edge between them, or two, and so has every boundary none or all its messages."""
    spec, layout = load_spec("lab-30m"), Layout.parse(slug)
    shape = StepShape(decode_seqs=1, context_tokens=64)
    sums = [op for op in axis_traffic("tp", layout, spec, shape, 4) if op.operation == "all_reduce"]
    messages = axis_traffic("pp", layout, spec, shape, 4)
    spanning = layout.tp == 8
    expected = sum(op.wire_bytes(8) * 2 for op in sums) * spanning
    expected += sum(op.bytes_each * layout.tp for op in messages) * (layout.dp == 1)  # one boundary between the halves
    stages = lesson06.stages_of(layout)
    assert lesson06.link_bytes(stages, HALVES, spec.num_layers, spec.hidden_size * 4) == expected


def test_stages_are_those_of_one_replica_in_order():
    assert lesson06.stages_of(Layout.parse("dp2xpp2xtp2")) == [[0, 1], [2, 3]]


def test_tokens_that_shared_a_step_are_counted_by_the_sequences_that_decoded():
    alone, shared = replace_step(num_decode_seqs=3), replace_step(num_decode_seqs=1, num_prefill_seqs=1)
    both = run([request(0, 0, 10, 500)], [alone, shared])
    assert apart.shared_share(both) == 0.25
    assert apart.token_ms(both, False) == apart.token_ms(both, True) == 40.0
    assert apart.token_ms(run([], [alone]), True) is None


def replace_step(**changes: int) -> object:
    made = step(0, 0, 40)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


PD = "prefill:tp1,decode:tp1"


def apart_run(**more: object) -> object:
    """Rank 0 prefills for 30 ms, rank 1 decodes for 10 ms, in 100 ms."""
    prefill, decode = step(0, 0, 30, 100), step(1, 40, 50)
    decode.ranks = [1]
    ladder = {"p50": 10.0, "p99": 12.0, "mean": 11.0, "n": 4, "few": ["p99"]}
    return run([request(0, 0, 35, 100)], [prefill, decode], layout=PD, itl_ms=ladder, ttft_ms=ladder, **more)


def test_the_table_of_pools_says_which_rank_stood_idle_and_what_is_uncertain():
    (row,) = apart.apart_table({"apart": apart_run()}).rows
    assert row[:5] == ["apart", "0%", "10.0 ms", "none", "10.0 ms"]
    assert row[5:] == ["12.0 ms (too few samples)", "10.0 ms (n = 4)", "70%, 90%"]


def test_a_handoff_is_held_against_the_kv_of_the_prompts():
    told = {"num": 1, "bytes": 40_960, "ms": {"p50": 2.5}, "mib_per_s": 15.6}
    made = apart_run(handoff=told, ttft_parts_ms={"handoff": 2.6})
    (row,) = apart.handoff_table({"near": made}, ReferenceCase("lab-moe-8x")).rows
    assert row == ["near", "1", "40,960 B", "40,960 B", "2.5 ms", "16 MiB/s", "2.6 ms of 11.0 ms"]


def test_without_nodes_one_sentence_says_why_and_the_ranks_are_on_one_node(monkeypatch: pytest.MonkeyPatch):
    class Started:
        def __init__(self, **options: object) -> None:
            self.options = options

    monkeypatch.setattr(own_server, "why_not", lambda: "it needs root; do something else.")
    monkeypatch.setattr(beside, "OwnServer", Started)
    server = beside.two_halves("lab-moe-8x", 4, "200mbit")
    assert server.note.endswith("only the bytes can be compared: it needs root; do something else.")
    assert server.options["ranks"] == 8 and "nodes" not in server.options  # type: ignore[attr-defined]
    state = {"nodes": [{"node": 0, "ranks": list(range(8))}], "num_ranks": 8}
    assert node_map(state, 4) == HALVES


def test_the_map_of_nodes_is_what_the_ranks_told():
    told = [{"node": 0, "ranks": [0, 2]}, {"node": 1, "ranks": [1, 3]}]
    assert node_map({"nodes": told, "num_ranks": 4}, 2) == [0, 1, 0, 1]
