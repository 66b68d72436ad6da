"""A run as Chrome trace events, and who held it up, from rows made by hand."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from labkit.measure.records import StepRecord
from labkit.measure.stragglers import critical_path, path_shares, stragglers
from labkit.measure.trace import RANKS, REQUESTS, chrome_trace
from tests.measure.make import MS, request
from tests.measure.trace_form import validate

US = 1000


def step(start_ms: int = 0, end_ms: int = 10, ranks: int = 2, prefill: int = 0, step_id: int = 1) -> StepRecord:
    return StepRecord(
        run_id="r", epoch=1, step_id=step_id, replica=0, layout="tp2", start_ns=start_ms * MS, end_ns=end_ms * MS,
        num_prefill_seqs=int(prefill > 0), num_decode_seqs=int(prefill == 0), prefill_tokens=prefill, context_tokens=0,
        ranks=list(range(ranks)), rank_start_ns=[start_ms * MS] * ranks, rank_end_ns=[end_ms * MS] * ranks,
        compute_ns=[8 * MS] * ranks, wait_ns=[MS] * ranks, transfer_ns=[MS] * ranks, collective_bytes=0,
        num_collectives=0,
    )  # fmt: skip


def row(rank: int, seq: int, enter_us: int, exit_us: int, wait_us: int = 0, **more: Any) -> dict[str, Any]:
    usual = {"op": "all_reduce", "axis": "tp", "phase": "decode", "layer": 0, "bytes": 1024, "group_id": 0,
             "epoch": 1, "step_id": 1}  # fmt: skip
    return {**usual, "rank": rank, "seq": seq, "enter_ns": enter_us * US, "exit_ns": exit_us * US,
            "wait_ns": wait_us * US, "transfer_ns": (exit_us - enter_us - wait_us) * US, **more}  # fmt: skip


# rank 1 comes to the first call 2 ms late, rank 0 to the second 1 ms late
ROWS = pd.DataFrame(
    [row(0, 0, 1000, 3500, 2000), row(1, 0, 3000, 3500), row(0, 1, 6000, 6500), row(1, 1, 5000, 6500, 1000)]
)


def test_each_rank_has_a_track_with_its_steps_and_calls_inside() -> None:
    events = validate(chrome_trace([step(), step(10, 20, prefill=32, step_id=2)], ROWS))
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert named == {0: "rank 0", 1: "rank 1"}
    mine = [event for event in events if event["ph"] == "X" and event["tid"] == 0]
    assert [event["name"] for event in mine] == [
        "decode", "all_reduce (tp)", "wait", "transfer", "all_reduce (tp)", "transfer", "prefill",
    ]  # fmt: skip
    call, wait, transfer = mine[1:4]
    assert (call["ts"], call["dur"]) == (1000, 2500) and (wait["dur"], transfer["dur"]) == (2000, 500)
    assert call["args"] == {"axis": "tp", "phase": "decode", "layer": 0, "bytes": 1024, "step": 1}


def test_requests_overlap_and_are_a_process_of_their_own() -> None:
    requests = [request(0, (5, 9), index=0), request(2, (6,), index=1), request(3, (), index=2, status="failed")]
    events = validate(chrome_trace([step()], ROWS, requests))
    mine = [event for event in events if event["pid"] == REQUESTS and event["ph"] in "be"]
    assert {event["id"] for event in mine} == {"r-0", "r-1"} and len(mine) == 8
    assert {event["pid"] for event in events} == {RANKS, REQUESTS}


def test_nothing_recorded_is_an_empty_trace() -> None:
    assert validate(chrome_trace([], ROWS.head(0))) == [
        {"ph": "M", "name": "process_name", "pid": RANKS, "tid": 0, "args": {"name": "ranks"}}
    ]


def test_who_was_last_has_a_name_a_share_and_a_lag() -> None:
    more = pd.DataFrame([row(0, 2, 7000, 9500, 2000), row(1, 2, 9000, 9500)])
    found = stragglers(pd.concat([ROWS, more])).to_dict("records")
    assert [(each["rank"], each["times_last"], each["of"]) for each in found] == [(1, 2, 3), (0, 1, 3)]
    assert found[0]["behind_us"] == pytest.approx(2000) and found[0]["share"] == pytest.approx(2 / 3)


def test_messages_and_barriers_are_no_straggling() -> None:
    rows = pd.DataFrame([row(0, 0, 0, 10, op="send"), row(1, 0, 0, 10, op="recv"), row(0, 1, 0, 5, op="barrier"),
                         row(1, 1, 0, 5, op="barrier")])  # fmt: skip
    assert not len(stragglers(rows))


def test_the_critical_path_goes_from_who_was_waited_for_to_who_was_waited_for() -> None:
    path = critical_path(step(), ROWS)
    assert path == [(1, 0, 3000 * US), (0, 3000 * US, 10 * MS)]
    assert sum(path_shares(path).values()) == pytest.approx(1) and path_shares(path)[1] >= 0.3


def test_a_message_that_was_waited_for_leads_to_its_sender() -> None:
    sent, received = row(0, 7, 4000, 4100, op="send", axis="pp"), row(1, 7, 1000, 4200, 3000, op="recv", axis="pp")
    rows = pd.DataFrame([sent, received])
    slow = step()
    slow.rank_end_ns = [4 * MS, 10 * MS]
    assert critical_path(slow, rows) == [(0, 0, 4000 * US), (1, 4000 * US, 10 * MS)]


def test_a_rank_is_held_against_its_own_groups_calls():
    """Two groups of one axis: rank 3 is last to all of its group's calls, not to half of everybody's."""
    others = ROWS.assign(rank=ROWS["rank"] + 2, group_id=1)
    others = others[others["seq"] == 0]
    found = stragglers(pd.concat([ROWS, others])).set_index("rank")
    assert found.loc[3, "share"] == 1.0 and found.loc[3, "of"] == 1
    assert found.loc[1, "share"] == 0.5 and found.loc[1, "of"] == 2


SLICE = {"ph": "X", "name": "a", "cat": "c", "pid": 1, "tid": 1, "ts": 0, "dur": 10}


@pytest.mark.parametrize(
    "wrong",
    [
        {**SLICE, "ts": 5},
        {**SLICE, "ts": 20, "dur": -1},
        {**SLICE, "ts": 20, "tid": "main"},
        {**SLICE, "ts": -1},
        {**SLICE, "ts": 20, "cat": ""},
        {**SLICE, "ts": float("nan")},
        {**SLICE, "ph": "Z"},
        {**SLICE, "ph": "B", "ts": 20},
        {**SLICE, "ph": "E", "ts": 20},
        {**SLICE, "ph": "b", "ts": 20, "id": "r"},
        {**SLICE, "ph": "e", "ts": 20, "id": "r"},
        {**SLICE, "ph": "f", "ts": 5, "id": 7},
        {**SLICE, "ph": "s", "ts": 5, "id": 7, "tid": 9},
        {"ph": "M", "name": "colour", "pid": 1, "tid": 1, "args": {"name": "red"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"title": "rank 0"}},
    ],
    ids=str,
)
def test_what_breaks_the_form_is_caught(wrong: dict[str, Any]) -> None:
    right = [SLICE, {**SLICE, "ph": "s", "id": 1, "ts": 2}, {**SLICE, "ph": "f", "id": 1, "ts": 3}]
    validate({"traceEvents": right})
    with pytest.raises((AssertionError, KeyError, ValueError)):
        validate({"traceEvents": [*right, wrong]})
