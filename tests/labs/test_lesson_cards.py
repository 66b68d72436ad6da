"""The card of a layout's axes, on recorded rows whose counts can be seen at a glance."""

from __future__ import annotations

import pandas as pd
import pytest
from test_lesson05 import skewed_run
from test_readings import request, run, step

from labkit.lab.run import Run
from labkit.layout import Layout
from labkit.teach.card import five_questions
from labkit.teach.readings import at_once
from labkit.teach.reference import ReferenceCase

MIB = 2**20


def answers(case: ReferenceCase, found: Run, axis: str = "") -> dict[str, str]:
    table = five_questions(case, found)
    at = table.columns.index(axis) if axis else 1
    return {row[0]: row[at] for row in table.rows}


def decoding(layout: str, rows: list[tuple[str, str, int, int]], ranks: tuple[int, ...] = (0, 1)) -> Run:
    """One prefill step without a crossing and one decode step; rows: (axis, op, group, bytes), alike on all ranks."""
    made = run([request(0, 0, 10, 20)], [step(0, 0, 30, 64), step(0, 30, 40)], layout=layout)
    held = {"attention": 12 * MIB, "mlp": 36 * MIB, "embedding": 6 * MIB, "head": 2 * MIB, "norm": 1 << 10}
    made.summary["memory_bytes"] = [{"rank": rank, "weights_by_part": held} for rank in ranks]
    made.__dict__["collectives"] = pd.DataFrame(
        [
            {"epoch": 1, "step_id": 30, "rank": rank, "group_id": group, "seq": seq, "op": op, "axis": axis,
             "phase": "decode", "bytes": size}
            for seq, (axis, op, group, size) in enumerate(rows) for rank in ranks
        ]
    )  # fmt: skip
    return made


def test_a_card_has_the_runs_counts_beside_those_of_the_shapes():
    """17 sums of 2 KiB and the logits were recorded for the one decode step of two ranks."""
    rows = [("tp", "all_reduce", 0, 2048)] * 17 + [("tp", "gather", 0, 16384)]
    found = answers(ReferenceCase(), decoding("tp2", rows))
    assert found["how often, in a decode step"] == "18 of 2.78 KiB (18 of 2.78 KiB)"
    assert found["how often, in a prefill step"] == "never (18)"
    assert "mlp: 72 MiB → 36 MiB (36 MiB)" in found["what is partitioned"]
    assert "embedding: 16 MiB → 8 MiB" in found["what is partitioned"], "a tied head's copy counts with it"
    assert found["what stays replicated"] == "norm, 2 copies" and "what it costs" not in found


def test_the_arithmetic_is_that_of_the_runs_own_steps():
    """Prefills of 64 and of 192 tokens: a sum is of 128 rows on average."""
    made = decoding("pp2", [("pp", "send", 0, 2048)], (0,))
    made.step_records.append(step(0, 50, 80, 192))
    often = answers(ReferenceCase(), made)
    assert often["how often, in a prefill step"] == "never (1)"
    made.collectives["phase"], made.collectives["step_id"] = "prefill", 0
    assert answers(ReferenceCase(), made)["how often, in a prefill step"] == "0.5 of 2 KiB (1 of 256 KiB)"
    assert answers(ReferenceCase(), made)["how often, in a decode step"] == "never (1)"


def test_what_improves_only_in_one_phase_is_told_with_it():
    found = answers(ReferenceCase(), decoding("pp2", [("pp", "send", 0, 2048)]))
    assert "steps in flight: 1 → 2;" in found["what it improves"] + ";"
    assert "(prefill)" in found["what it improves"] and "(decode)" in found["what it improves"]


def test_experts_of_two_replicas_are_one_exchange_in_the_steps_of_both():
    """Each replica has a prompt of 4 tokens: 8 exchanges, and none is counted twice for the two replicas."""
    made = skewed_run()
    rows = made.collectives
    rows["epoch"], rows["group_id"], rows["phase"] = 1, 0, "prefill"
    rows["seq"] = rows.groupby("rank").cumcount()
    found = answers(ReferenceCase("lab-moe-8x"), made, "EP2")
    assert found["what is partitioned"] == "experts: 24 MiB → 12 MiB (12 MiB)"
    assert found["what stays replicated"] == "router, 2 copies"
    assert found["how often, in a prefill step"].startswith("8 of 8.02 KiB (8 of ")
    assert not any("decode" in question for question in found), "it had no such step"


@pytest.mark.parametrize(
    ("layout", "axis", "op", "count"),
    [
        ("pp2xtp4", "tp", "", 1), ("pp2xtp4", "pp", "isend", 4), ("dp2xtp2", "tp", "", 1),
        ("pcp2+ring", "pcp", "isend", 2), ("pcp2xtp2", "tp", "", 2), ("dp2xtp2xep4", "ep", "", 1),
    ],
)  # fmt: skip
def test_groups_beside_each_other(layout: str, axis: str, op: str, count: int):
    assert at_once(Layout.parse(layout), axis, op) == count


def test_a_card_of_one_rank_is_refused_and_one_without_steps():
    with pytest.raises(ValueError, match="TP1 uses no axis"):
        five_questions(ReferenceCase("lab-moe-8x"), run([]))
    with pytest.raises(ValueError, match="no pure prefill or decode step"):
        five_questions(ReferenceCase("lab-moe-8x"), Run("r", {"layout": "dp2xep2"}, []))
