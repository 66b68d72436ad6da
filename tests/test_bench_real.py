"""`labkit bench collectives` on real ranks: every operation is right, a wrong answer is caught, and a plain timed loop
agrees."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from labkit.cli import app
from labkit.lab.bench import Benchmark, BenchPlan, marks, measure, summary
from labkit.layout import Layout, StepShape
from labkit.measure.collectives import BOTH_PLACES, OPS, row
from labkit.measure.pairs import pair_row

pytestmark = pytest.mark.engine
QUICK = {"num_warmup": 1, "num_rounds": 3, "num_bytes": (64, 5000)}


def bench(layout: str, **plan) -> list[dict]:
    return asyncio.run(measure(BenchPlan(Layout.parse(layout), **{**QUICK, **plan})))


@pytest.mark.parametrize("fabric", ["shm", pytest.param("gloo", marks=pytest.mark.slow)])
def test_every_operation_is_measured_and_right(fabric: str) -> None:
    rows = bench("tp2", ops=OPS, fabric=fabric)
    assert len(rows) == 2 * (len(OPS) + len(BOTH_PLACES))
    assert all(row["wrong"] == 0 and row["time_us"] > 0 and row["n"] == 3 and row["fabric"] == fabric for row in rows)


@pytest.mark.slow
def test_each_group_of_an_axis_has_its_own_row() -> None:
    rows = bench("pp2xtp2", axis="pp", ops=("ring", "all_gather", "sendrecv"), num_bytes=(4096,))
    assert [(row["op"], row["group_ranks"]) for row in rows] == [
        (op, ranks) for op in ("ring", "all_gather", "sendrecv") for ranks in ([0, 2], [1, 3])
    ]
    assert not any(row["wrong"] for row in rows)


def test_a_wrong_answer_is_caught_and_a_wrong_message_in_its_pair() -> None:
    async def ask() -> tuple[list[dict], list[dict]]:
        plan = BenchPlan(Layout(tp=2), **{**QUICK, "num_bytes": (4096,)}, module="tests.cluster.lying_worker")
        async with Benchmark(plan) as ranks:
            return await ranks.rows(), await ranks.pairs()

    rows, (pair,) = asyncio.run(ask())
    assert [row["wrong"] for row in rows] == [1, 1]
    assert pair["wrong"] == 4, "rank 1's answer in each of the four questions"


@pytest.mark.slow
def test_a_plain_timed_loop_agrees() -> None:
    """By the quickest rounds, which other processes spoil least: a wrong unit, factor or clock is off by far more."""
    words = [sys.executable, "benchmarks/bench_agrees.py", "--turns", "8", "--sizes", "65536,1048576"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=True)
    told = json.loads(done.stdout.splitlines()[-1])["rows"]
    quickest = [each for each in told if each["statistic"] == "min_us"]
    assert len(quickest) == 4
    for each in quickest:
        assert 0.8 < each["ratio"] < 1.25, each


def test_the_models_messages_are_marked_on_the_lines() -> None:
    plan = BenchPlan(Layout(tp=2), num_bytes=(64, 1 << 20), num_rounds=5)
    rows = [
        row("all_reduce", size, 2, [1000 + size], wrong=0, in_place=in_place, group=0, fabric="shm")
        for in_place in (False, True)
        for size in plan.num_bytes
    ]
    found = marks(plan, "lab-5m", rows, {"decode": StepShape(decode_seqs=1, context_tokens=9)})
    reduce = next(mark for mark in found if mark["op"] == "all_reduce")
    assert reduce["count"] == 2 * 6 + 1 and reduce["step_us"] == pytest.approx(reduce["time_us"] * reduce["count"])
    assert summary(plan, rows)["fits"][0]["op"] == "all_reduce"


def ask(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "labkit.cli", "bench", "collectives", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command_ends_with_one_json_line() -> None:
    words = ["--ranks", "2", "--op", "all_reduce", "--max-bytes", "1KiB", "--rounds", "3", "--device", "cpu", "--json"]
    done = ask(*words)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert {(row["op"], row["bytes"]) for row in found["rows"]} == {("all_reduce", size) for size in (64, 256, 1024)}
    assert found["wrong"] == 0 and found["fits"] and found["marks"]


def test_pairs_are_a_line_each_and_one_json_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks' part is above; here is the command's."""
    pair = pair_row(0, 2, [20_000], [2_000_000], 4_000_000, wrong=0, fabric="gloo", spans_nodes=True)

    async def measured(plan: BenchPlan, on_row: Any) -> list[dict]:
        if on_row is not None:
            on_row(pair)
        return [pair]

    monkeypatch.setattr("labkit.lab.bench.measure_pairs", measured)
    command = ["bench", "collectives", "--ranks", "3", "--pairs", "--device", "cpu"]
    lines = CliRunner().invoke(app, command).stdout.splitlines()
    assert lines[1].split() == ["0,", "2", "10.0", "10.0", "4000000", "4.000", "0", "gloo", "across", "nodes"]
    (line,) = CliRunner().invoke(app, [*command, "--json"]).stdout.splitlines()
    found = json.loads(line)
    assert found["pairs"] == [pair] and found["wrong"] == 0 and found["fabric"] == "shm"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--op", "reduce"], "'reduce' is no collective that is measured here"),
        (["--layout", "tp2", "--axis", "pp"], "TP2 has no group of two ranks or more on the axis 'pp'"),
        (["--ranks", "1"], "split it over more ranks"),
        (["--rounds", "0"], "measure 1 round or more"),
        (["--min-bytes", "2"], "the smallest must be at least 4"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(words: list[str], sentence: str) -> None:
    done = ask(*words)
    assert done.returncode == 2 and sentence in done.stderr and len(done.stderr.splitlines()) == 1
