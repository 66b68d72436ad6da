"""What lesson 03 reads off a pipeline's steps and messages, on rows whose answer can be seen at a glance."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from notebooks import LABS, exercises
from test_solutions import outcome

from labkit.cluster.namespaces import existing
from labkit.cluster.nodes import why_not
from labkit.lab.run import Run
from labkit.layout import balance_stages
from labkit.measure.records import StepRecord
from labkit.server.client import ServerError
from labkit.teach import beside, lesson03, own_server, readings
from labkit.teach.reference import ReferenceCase

MS = 1_000_000
PATH = next(path for path in LABS if path.stem.startswith("03"))


def step(number: int, start_ms: int, work_ms: tuple[int, int], prefill: int = 0) -> StepRecord:
    """PP2: stage 1 begins when stage 0 has ended."""
    first, second = work_ms
    ends = [start_ms + first, start_ms + first + second]
    return StepRecord(
        run_id="r", epoch=1, step_id=number, replica=0, layout="pp2", start_ns=start_ms * MS, end_ns=ends[1] * MS,
        num_prefill_seqs=int(prefill > 0), num_decode_seqs=int(not prefill), prefill_tokens=prefill,
        context_tokens=0, ranks=[0, 1], rank_start_ns=[start_ms * MS] * 2, rank_end_ns=[end * MS for end in ends],
        compute_ns=[first * MS, (second - 1) * MS], wait_ns=[0, 0], transfer_ns=[0, MS], collective_bytes=0,
        num_collectives=1, idle_ns=[0, first * MS],
    )  # fmt: skip


def run(steps: list[StepRecord], **summary: Any) -> Run:
    return Run("r", {"layout": "pp2", **summary}, [], steps)


def test_the_stages_time_is_that_of_decode_steps_and_the_slowest_is_named():
    steps = [step(0, 0, (90, 10), 128), step(1, 100, (10, 13)), step(2, 200, (12, 17)), step(3, 300, (11, 15))]
    assert lesson03.stage_ms(run(steps)) == [11, 15] and lesson03.slowest_stage(run(steps)) == 1
    assert lesson03.stage_ms(run(steps), "prefill") == [90, 10]


def test_a_prompts_chunks_are_one_prefill_and_a_decode_ends_it():
    """Two chunks of 10 + 10 one after the other: half idle. Two that overlap: (10 + 10) · 2 of 30 · 2."""
    alone = [step(0, 0, (10, 10), 128), step(1, 20, (10, 10), 128), step(2, 40, (5, 5))]
    assert lesson03.prompt_idle(run(alone)) == pytest.approx(0.5)
    overlapping = [step(0, 0, (10, 10), 128), step(1, 10, (10, 10), 128), step(2, 40, (5, 5))]
    assert lesson03.prompt_idle(run(overlapping)) == pytest.approx(1 / 3) == lesson03.fill_and_drain(2, 2)
    assert lesson03.prompt_idle(run(overlapping + [step(3, 100, (10, 10), 128)])) == pytest.approx((1 / 3 + 1 / 2) / 2)


@pytest.mark.parametrize(("layout", "messages"), [("tp2", 17), ("pp2", 1)])
def test_the_link_needs_at_least_the_time_for_what_a_rank_sends(layout: str, messages: int):
    case = ReferenceCase()
    row = 512 * case.spec.hidden_size * 4
    least = messages * row * 8 / 100e6 * 1e3
    assert least <= lesson03.link_ms(case, layout, 512, 100e6) < 1.01 * least, "logits of one row come on top"


def test_who_is_sooner_and_nothing_measured_is_nobody():
    def took(ms: float) -> Run:
        return run([], ttft_ms={"p50": ms, "n": 3})

    found = {("tp2", 512): took(20), ("pp2", 512): took(30), ("tp2", 1024): took(50), ("pp2", 1024): took(40)}
    assert (lesson03.sooner(found, 512), lesson03.sooner(found, 1024)) == ("tp2", "pp2")
    assert lesson03.sooner({}, 512) is None and lesson03.ttft_ms({}, "tp2", 512) is None
    assert lesson03.ttft_ms(found, "pp2", 512) == 30


def recorded(layout: str, per_step: list[tuple[str, str, int, int, tuple[int, ...]]], num_steps: int = 3) -> Run:
    """per_step: (op, axis, group, bytes, ranks) of one step of decoding."""
    rows = [
        {"epoch": 1, "step_id": at, "rank": rank, "op": op, "axis": axis, "phase": "decode", "bytes": size,
         "group_id": group, "seq": 100 * at + seq, "transfer_ns": 1000 * (seq + 1)}
        for at in range(num_steps) for seq, (op, axis, group, size, ranks) in enumerate(per_step) for rank in ranks
    ]  # fmt: skip
    found = Run("r", {"layout": layout}, [], [step(at, at, (1, 1)) for at in range(num_steps)])
    found.__dict__["collectives"] = pd.DataFrame(rows)  # what the store would give
    return found


def test_messages_are_counted_once_for_a_group_and_waits_for_sends_are_none():
    sums = recorded("tp2", [("all_reduce", "tp", 7, 2048, (0, 1))] * 17 + [("gather", "tp", 7, 4096, (0, 1))])
    (kind,) = readings.messages(sums, "decode")
    assert (kind.op, kind.per_step, kind.bytes_each) == ("all_reduce", 17, 2048)
    assert readings.message_us(sums) == 9 and not readings.messages(sums, "prefill")
    pair = [("send", "pp", 20, 2048, (0,)), ("recv", "pp", 20, 2048, (1,)), ("send", "pp", 20, 0, (0,))]
    found = recorded("pp2", pair)
    (kind,) = readings.messages(found, "decode", "pp")
    assert (kind.op, kind.per_step, kind.bytes_each) == ("send", 1, 2048)
    (row,) = lesson03.decode_messages({"x": {("pp2", 8): _timed(found), ("tp2", 8): _timed(sums)}}, 8).rows[1:]
    assert row == ["x", "PP2", "2,048 B", "2 µs", "1", "7.0 ms"]
    assert not readings.messages(found, "decode", "tp")


def _timed(run: Run) -> Run:
    run.summary["tpot_ms"] = {"p50": 7.0}
    return run


def test_what_crosses_is_told_with_its_fabric_and_whether_it_spans_nodes():
    pairs = [("send", "pp", 20 + lane, 3 << 20, (lane,)) for lane in (0, 1)]
    run = recorded("pp2xtp2", [*pairs, *(("all_reduce", "tp", g, 1 << 20, (2 * g, 2 * g + 1)) for g in (0, 1))])
    for row in run.step_records:
        row.num_prefill_seqs, row.num_decode_seqs = 1, 0
    run.collectives["phase"] = "prefill"
    groups = [
        {"axis": "tp", "fabric": "shm", "spans_nodes": False}, {"axis": "pp", "fabric": "gloo", "spans_nodes": True},
    ]  # fmt: skip
    assert lesson03.crossings_table({"x": run}, {"x": groups}).rows == [
        ["x", "tp", "shm", "within a node", "2", "1.00 MiB"], ["x", "pp", "gloo", "across nodes", "2", "3.00 MiB"],
    ]  # fmt: skip


def test_the_steady_state_of_the_formula_is_that_of_a_stepped_pipeline():
    for stage_ms in ([5.0, 7.0, 3.0], [4.0] * 4):
        for in_flight in range(1, 6):
            assert lesson03._stepped(stage_ms, in_flight) == pytest.approx(lesson03.idle_shares(stage_ms, in_flight))


SECOND = [
    "lambda layers, first, last, n: [len(layers) // n] * (n - 1) + [len(layers) - len(layers) // n * (n - 1)]",
    "lambda layers, first, last, n: stage_split_of(layers, 0.0, last, n)",
    "lambda layers, first, last, n: stage_split_of([1.0] * len(layers), first, last, n)",
    "lambda layers, first, last, n: [len(layers) - 1] + [1] * (n - 1)",
]


@pytest.mark.parametrize("mistake", SECOND)
def test_a_likely_mistake_in_dealing_out_layers_is_caught(mistake: str):
    _, check, _ = exercises(PATH)[1]
    definition = f"from labkit.teach.lesson03 import stage_split as stage_split_of\nstage_split = {mistake}"
    assert not outcome(PATH, definition, check)


def test_every_case_of_the_second_exercise_is_the_balancers_best():
    for args, _ in lesson03._SPLITS:
        profile, best = lesson03._profile(*args[:3]), balance_stages(lesson03._profile(*args[:3]), args[3])
        stages = profile.stages(tuple(lesson03.stage_split(*args)))
        assert max(stage.seconds for stage in stages) == pytest.approx(best.slowest_s)


class Here:
    """A lesson on a server of CPU ranks."""

    case = ReferenceCase()

    @property
    def lab(self) -> Here:
        return self

    def state(self) -> dict[str, Any]:
        return {"environment": {"backend": "cpu"}}


def test_where_no_nodes_can_be_made_one_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(own_server, "why_not", lambda: "--nodes needs root; or join real nodes.")
    with beside.two_nodes(Here()) as far:  # type: ignore[arg-type]
        assert far is None
    assert "stays unmeasured: --nodes needs root" in capsys.readouterr().out


@pytest.mark.parametrize(("says", "skips"), [("the nodes could not be made: no rights; or …", True), ("no KV", False)])
def test_a_kernel_that_makes_no_nodes_is_told_and_other_failures_are_raised(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], says: str, skips: bool
):
    def fails(**_: Any) -> None:
        raise ServerError(says)

    monkeypatch.setattr(own_server, "why_not", lambda: "")
    monkeypatch.setattr(own_server, "OwnServer", fails)
    expected = contextlib.nullcontext() if skips else pytest.raises(ServerError, match="no KV")
    with expected, beside.two_nodes(Here()) as far:  # type: ignore[arg-type]
        assert far is None
    assert ("no rights" in capsys.readouterr().out) == skips


def _parent(pid: int) -> int:
    status = Path(f"/proc/{pid}/stat")
    return int(status.read_text().rpartition(")")[2].split()[1]) if status.exists() else 0


@pytest.mark.engine
def test_a_server_of_ones_own_ends_with_its_block_also_when_that_raises():
    places: dict[str, Any] = {} if why_not() else {"nodes": 2, "ranks_per_node": 1, "link": "100mbit"}
    with pytest.raises(ZeroDivisionError), beside.own_lab(model="lab-5m", **(places or {"ranks": 2})) as lab:
        assert lab.state()["topology"]["num_nodes"] == (2 if places else 1)
        mine = [name for name in existing() if _parent(int(name.split("-")[1])) == os.getpid()]
        assert bool(mine) == bool(places), "a namespace for each node, and the switch's"
        raise ZeroDivisionError
    assert not set(existing()) & set(mine)
    with pytest.raises(ServerError, match="does not answer"):
        lab.state()
