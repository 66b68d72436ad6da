"""From what a session measured of single axes to their panels: the real session, filled by hand, without a server."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from labkit.lab.live import LiveSession
from labkit.measure.metrics import Objective
from labkit.measure.records import StepRecord
from labkit.server.client import ServerClient
from labkit.show import frame as f
from labkit.show.from_axes import name_of
from labkit.show.from_snapshot import frame_of
from tests.measure.make import MS, request, server_times, step

REPLICA = {"waiting": 1, "running": 2, "kv_used_blocks": 3, "kv_total_blocks": 10, "kv_block_tokens": 32}


@pytest.fixture
def session() -> LiveSession:
    made = LiveSession(ServerClient("http://127.0.0.1:9"), objective=Objective())
    made._reset_steps(time.monotonic_ns() - 1_000 * MS)
    return made


def state_of(layout: str, **fields: Any) -> dict[str, Any]:
    return {"state": "ready", "layout": layout, "layout_name": layout.upper(), "num_ranks": 2, **fields}


def recent_step(layout: str = "tp1", **fields: Any) -> StepRecord:
    now_ms = time.monotonic_ns() / MS
    made = step(now_ms - 90, now_ms - 50, [20, 10], [1, 1], [1, 1])
    made.layout, made.idle_ns = layout, [0, 15 * MS]
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def tell(session: LiveSession, *steps: StepRecord, crossings: list[dict[str, Any]] = []) -> None:  # noqa: B006
    """As the event stream does it."""
    session._on_event("steps", {"steps": [msgspec.to_builtins(one) for one in steps], "crossings": crossings})


def test_a_layout_of_one_rank_has_nothing_of_single_axes(session: LiveSession) -> None:
    session.watch.state = state_of("tp1", replicas=[{**REPLICA, "ranks": [0]}])
    tell(session, recent_step())
    frame = frame_of(session.snapshot())
    assert (frame.gantt, frame.experts, frame.handoff, frame.crossings) == (None, None, None, [])
    assert frame.lab is not None and frame.lab.pools == []


def test_stages_come_from_the_step_records_and_anew_once_a_second(session: LiveSession) -> None:
    tell(session, recent_step("pp2"))
    gantt = frame_of(session.snapshot()).gantt
    assert gantt is not None and [(row.stage, row.ranks) for row in gantt.rows] == [(0, [0]), (1, [1])]
    assert gantt.rows[1].bars[0][1:] == [15, 10, 2] and gantt.clock_ms is None
    tell(session, recent_step("pp2", step_id=1))
    again = frame_of(session.snapshot()).gantt
    assert again == gantt, "within the second the picture stands"
    session._stages = (0.0, None)
    anew = frame_of(session.snapshot()).gantt
    assert anew is not None and len(anew.rows[0].bars) == 2


def test_stages_on_several_hosts_come_with_how_far_their_clocks_agree(session: LiveSession) -> None:
    clock = {"host": "far", "ranks": [1], "offset_ns": 9 * MS, "best_round_trip_ns": MS, "num_round_trips": 9}
    session.watch.state = state_of("pp2", clocks=[{**clock, "uncertainty_ns": MS // 4}])
    tell(session, recent_step("pp2"))
    gantt = frame_of(session.snapshot()).gantt
    assert gantt is not None and gantt.clock_ms == 0.25


def test_experts_with_their_owners(session: LiveSession) -> None:
    session.watch.state = state_of("tp2xep2", experts={"placements": [[[0, 1], [2, 3, 0]]]})
    figures = {"expert_rows": [40, 10], "expert_sent_bytes": [9, 8], "expert_ns": [1, 1], "expert_wait_ns": [0, 2 * MS]}
    tell(session, recent_step("tp2xep2", expert_tokens=[5, 1, 2, 3], num_dropped=1, **figures))
    experts = frame_of(session.snapshot()).experts
    assert experts is not None and experts.tokens == [5, 1, 2, 3] and experts.num_dropped == 1
    assert experts.owners == [[0, 1], [0], [1], [1]], "expert 0 has a copy"
    assert [(rank.rows, rank.wait_ms) for rank in experts.ranks] == [(40, 0.0), (10, 2.0)]


def test_experts_that_tp_cuts_have_no_owner(session: LiveSession) -> None:
    session.watch.state = state_of("tp2", experts={"placements": [[[0, 1]]]})
    figures = {"expert_rows": [1, 1], "expert_sent_bytes": [0, 0], "expert_ns": [1, 1], "expert_wait_ns": [0, 0]}
    tell(session, recent_step("tp2", expert_tokens=[5, 1], **figures))
    experts = frame_of(session.snapshot()).experts
    assert experts is not None and experts.owners == []


def test_kv_counts_tokens_and_how_many_more_requests_fit(session: LiveSession) -> None:
    session.watch.state = state_of("pcp2xdcp2", replicas=[{**REPLICA, "ranks": [0, 1]}])
    (kv,) = frame_of(session.snapshot()).kv
    assert (kv.resident_tokens, kv.total_tokens, kv.shared_by, kv.more_requests) == (96, 320, 2, None)
    for n in (20, 40):
        session._joined(request(0, tuple(range(n))))
    (kv,) = frame_of(session.snapshot()).kv
    assert kv.more_requests == 5, "224 tokens of room, 40 in the mean request: 10 of prompt and 30 of answer"


def test_pools_stand_side_by_side(session: LiveSession) -> None:
    pools = [
        {"role": "prefill", "layout": "tp2", "layout_name": "TP2", "ranks": [0, 1]},
        {"role": "decode", "layout": "dp2", "layout_name": "DP2", "ranks": [2, 3]},
    ]
    replicas = [
        {**REPLICA, "ranks": [0, 1], "pool": 0, "role": "prefill"},
        {**REPLICA, "ranks": [2], "pool": 1, "role": "decode"}, {**REPLICA, "ranks": [3], "pool": 1, "role": "decode"},
    ]  # fmt: skip
    choice = {"layout": "prefill:tp1,decode:tp1", "name": "prefill:TP1, decode:TP1", "legal": True, "num_ranks": 2}
    layouts = [{"layout": "tp1", "name": "TP1", "legal": True, "num_ranks": 1}, {**choice, "pools": True}]
    session.watch.state = state_of("prefill:tp2,decode:dp2", pools=pools, replicas=replicas, layouts=layouts)
    frame = frame_of(session.snapshot())
    assert frame.lab is not None
    assert [choice.layout for choice in frame.lab.pool_choices] == ["prefill:tp1,decode:tp1"]
    assert [(p.role, p.layout_name, p.running, p.resident_tokens) for p in frame.lab.pools] == [
        ("prefill", "TP2", 2, 96), ("decode", "DP2", 4, 192),
    ]  # fmt: skip
    assert [kv.role for kv in frame.kv] == ["prefill", "decode", "decode"]


def test_a_handoff_is_of_the_requests_that_ended_lately(session: LiveSession) -> None:
    for handoff_ms in (2, 4):
        record = request(0, (10, 20, 30))
        record.server = server_times(record, {}, handoff_ns=handoff_ms * MS, handoff_bytes=3 * 2**20)
        session._joined(record)
    handoff = frame_of(session.snapshot()).handoff
    assert handoff is not None and (handoff.num, handoff.bytes, handoff.p50_ms) == (2, 3 * 2**20, 3.0)
    assert handoff.mib_per_s == pytest.approx(1000)


def test_what_crosses_is_this_layouts(session: LiveSession) -> None:
    crossing = {"axis": "tp", "op": "all_reduce", "phase": "decode", "num": 26, "bytes": 26_000, "ranks": [0, 1]}
    tell(session, recent_step("tp2"), crossings=[crossing])
    (mark,) = frame_of(session.snapshot()).crossings
    assert (mark.axis, mark.phase, mark.bytes, mark.ops[0].op) == ("tp", "decode", 1000, "all_reduce")
    session._on_event("switch", {"layout": "dp2"})
    assert frame_of(session.snapshot()).crossings == []


def test_a_layout_has_its_printed_name() -> None:
    assert name_of("pcp2xtp2+ring") == "PCP2×TP2+ring"
    assert name_of("prefill:tp2,decode:tp1") == "prefill:TP2, decode:TP1"
    assert name_of("?") == "?"


def test_a_frame_with_every_panel_stays_small(session: LiveSession) -> None:
    for i in range(400):
        tell(session, recent_step("pp2", step_id=i))
    gantt = f.to_message(frame_of(session.snapshot()))["gantt"]
    assert len(msgspec.json.encode(gantt)) < 4096


def test_figures_of_one_layout_never_stand_under_the_name_of_another(session: LiveSession) -> None:
    """The stream tells that the layout is another before the answer to our own switch is there."""
    session._on_event("state", state_of("tp1"))
    now_ms = time.monotonic_ns() / MS + 1
    time.sleep(0.02)  # until it has ended
    session._joined(request(now_ms, (now_ms + 5, now_ms + 9)))
    tell(session, recent_step("tp1"))
    assert session.snapshot()["ttft_ms"]["n"] == 1
    session._on_event("state", state_of("tp1"))
    assert session.snapshot()["ttft_ms"]["n"] == 1, "the same layout told again changes nothing"
    session._on_event("state", state_of("tp2"))
    seen = session.snapshot()
    assert seen["ttft_ms"]["n"] == 0 and seen["tokens_per_request"] is None
