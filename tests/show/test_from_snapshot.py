"""From what a live session measured to what the page draws: the real session, filled by hand, without a server."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from labkit.lab.holding import Holding
from labkit.lab.live import LiveSession
from labkit.layout import Layout
from labkit.measure.metrics import Objective
from labkit.measure.records import MemoryRecord, RequestRecord, ServerTimes, StepRecord
from labkit.model.spec import load_spec
from labkit.server.client import ServerClient
from labkit.server.picture import Picture
from labkit.show import frame as f
from labkit.show.from_snapshot import frame_of

MS = 1_000_000


def request(index: int, now_ns: int, ttft_ms: float, n: int = 11, gap_ms: float = 10.0) -> RequestRecord:
    scheduled = now_ns - round((ttft_ms + gap_ms * (n - 1) + 1) * MS)
    arrivals = [scheduled + round((ttft_ms + gap_ms * i) * MS) for i in range(n)]
    return RequestRecord(
        request_id=f"r-{index}", index=index, status="completed", scheduled_ns=scheduled, sent_ns=scheduled,
        first_ns=arrivals[0], last_ns=arrivals[-1], end_ns=arrivals[-1], prompt_tokens=100, n=n,
        chunk_ns=arrivals, chunk_tokens=[1] * n,
    )  # fmt: skip


def step(now_ns: int, replica: int, ranks: list[int], wait_ms: int) -> StepRecord:
    start, end = now_ns - 100 * MS, now_ns - 50 * MS
    k = len(ranks)
    return StepRecord(
        run_id="run", epoch=1, step_id=1, replica=replica, layout="tp2", start_ns=start, end_ns=end,
        num_prefill_seqs=0, num_decode_seqs=4, prefill_tokens=0, context_tokens=10, ranks=ranks,
        rank_start_ns=[start] * k, rank_end_ns=[end] * k, compute_ns=[(50 - wait_ms) * MS] * k,
        wait_ns=[wait_ms * MS] * k, transfer_ns=[0] * k, collective_bytes=0, num_collectives=0,
    )  # fmt: skip


def state_of(layout: Layout) -> dict[str, Any]:
    """As the server would send it, from the server's own code."""
    picture = Picture(load_spec("lab-5m"), 2, 1, "cpu", "gloo")
    return {
        "state": "ready", "model": "lab-5m", "layout": layout.slug, "layout_name": str(layout), "device": "cpu",
        "num_ranks": 2, "num_cores": 2, "threads_per_rank": 1, "backend": "gloo", "fabric": "shm", "dtype": "float32",
        "restarts_left": 3, "layouts": picture.layouts(), "queue": [], "settings": {"router": "least-work"},
        "holder": {"client": "me", "run_id": "run", "since_s": 3.0}, "ownership": picture._ownership(layout, "float32"),
        "memory": [msgspec.to_builtins(MemoryRecord(rank, 10, 70 + rank, 5, 1)) for rank in range(2)],
        "replicas": [{"waiting": 1, "running": 2, "kv_used_blocks": 3, "kv_total_blocks": 9, "ranks": [0, 1]}],
    }  # fmt: skip


@pytest.fixture
def session() -> LiveSession:
    made = LiveSession(ServerClient("http://127.0.0.1:9"), objective=Objective(ttft_ms=100, tpot_ms=50))
    made.window.start(time.monotonic_ns() - 4_000 * MS)
    return made


def run_on(session: LiveSession, layout: str = "tp2") -> None:
    holding = Holding(session.client, session._driver, lambda report: None, lambda records: None)
    holding.layout, holding.rate, holding.run_id, holding.role = layout, 4.0, "run", "running"
    session._holding = holding


def test_nothing_measured_is_nothing_not_zero(session: LiveSession) -> None:
    frame = frame_of(session.snapshot())
    assert frame.lab is None and frame.run is None and frame.switch is None
    assert frame.link == "absent" and frame.role == "watching"
    assert set(frame.series.requests_per_s) == {None} and set(frame.series.running) == {None}
    assert f.to_message(frame)["series"]["age_s"][0] == 60


def test_percentiles_goodput_and_throughput_are_the_measured_ones(session: LiveSession) -> None:
    now = time.monotonic_ns()
    for index, ttft_ms in enumerate((40, 60, 80, 200)):
        session.window.add(request(index, now, ttft_ms))
    session.watch.state = state_of(Layout(tp=2))
    run_on(session)
    run = frame_of(session.snapshot()).run
    assert run is not None and run.layout_name == "TP2" and run.router == "least-work"
    assert run.ttft_ms.n == 4 and run.ttft_ms.p50 == pytest.approx(70, abs=0.01)
    assert run.ttft_ms.few == ["p50", "p90", "p95", "p99"]
    assert run.tpot_ms.p99 == pytest.approx(10, abs=0.01)
    assert run.goodput.attainment == 0.75 and run.goodput.low < 0.75 < run.goodput.high
    assert run.output_tokens_per_s == pytest.approx(44 / 4, rel=0.1)


def test_who_holds_what_has_the_kv_cache_with_the_bytes_that_were_allocated(session: LiveSession) -> None:
    session.watch.state = state_of(Layout(tp=2))
    lab = frame_of(session.snapshot()).lab
    assert lab is not None
    kv = [next(part for part in row.parts if part.part == "kv") for row in lab.ownership]
    assert [(part.index, part.of, part.bytes) for part in kv] == [(0, 2, 70), (1, 2, 71)]
    norms = [next(part for part in row.parts if part.part == "norm") for row in lab.ownership]
    assert {part.kind for part in norms} == {"replicated"}
    mlp = [next(part for part in row.parts if part.part == "mlp") for row in lab.ownership]
    assert [(part.kind, part.index, part.of) for part in mlp] == [("partitioned", 0, 2), ("partitioned", 1, 2)]


def test_whose_ranks_they_are(session: LiveSession) -> None:
    session.watch.state = state_of(Layout(tp=2))
    lab = frame_of(session.snapshot()).lab
    assert lab is not None and lab.holder is not None and not lab.holder.is_you
    run_on(session)
    lab = frame_of(session.snapshot()).lab
    assert lab is not None and lab.holder is not None and lab.holder.is_you


def test_shares_by_rank_and_by_phase(session: LiveSession) -> None:
    session.meter.reset(time.monotonic_ns() - 2_000 * MS)
    session.watch.state = state_of(Layout(tp=2))
    session.meter.add([step(time.monotonic_ns(), 0, [0, 1], wait_ms=10)])
    steps = frame_of(session.snapshot()).steps
    assert [row.rank for row in steps.all] == [0, 1] and steps.prefill == []
    assert steps.decode[0].rank is None and steps.decode[0].wait == pytest.approx(0.2)
    assert all(sum((row.compute, row.wait, row.transfer, row.idle)) == pytest.approx(1) for row in steps.all)


def test_a_second_in_which_the_engine_said_nothing_had_no_requests(session: LiveSession) -> None:
    now = time.monotonic_ns()
    for age_s, waiting, running in ((5.5, 2, 4), (5.2, 2, 2), (0.5, 0, 1)):
        session.watch._queues.append((now - round(age_s * 1e9), waiting, running))
    series = frame_of(session.snapshot()).series
    by_age = dict(zip(series.age_s, zip(series.running, series.waiting, strict=True), strict=True))
    assert by_age[5] == (3.0, 2.0) and by_age[0] == (1.0, 0.0)
    assert by_age[3] == (0.0, 0.0), "a gap is not unknown: the engine speaks while it is busy"
    assert by_age[6] == (None, None), "before the first word nothing is known"


def told(index: int, now_ns: int, queue_ms: float) -> RequestRecord:
    """A request of which the server told its parts: the rest of its TTFT of 100 ms is compute."""
    made = request(index, now_ns - (40 - index) * 50 * MS, 100.0)
    at = made.scheduled_ns
    made.server = ServerTimes(
        request_id=made.request_id, run_id="run", layout="tp2", replica=0, routed_because="", received_ns=at,
        first_start_ns=at + round(queue_ms * MS), first_end_ns=made.first_ns, last_end_ns=made.last_ns,
        finished_ns=made.last_ns, prompt_tokens=100, cached_tokens=0, output_tokens=11, finish_reason="length",
        num_preemptions=0, requeued=False, queue_ns=round(queue_ms * MS), compute_ns=round((100 - queue_ms) * MS),
        decode_compute_ns=100 * MS,
    )  # fmt: skip
    return made


def test_where_ttft_went_what_holds_it_up_and_since_when_it_is_steady(session: LiveSession) -> None:
    now = time.monotonic_ns()
    session.watch.state = state_of(Layout(tp=2))
    run_on(session)
    session._recent.extend(told(index, now, queue_ms=70.0) for index in range(40))
    session.answers.add([step(now, 0, [0, 1], wait_ms=10)])
    frame = frame_of(session.snapshot())
    assert frame.why is not None and frame.steady is not None
    median = next(fall for fall in frame.why.waterfalls if (fall.figure, fall.q) == ("ttft", 50))
    assert median.parts["queue"] == pytest.approx(70) and median.parts["compute"] == pytest.approx(30)
    reasons = {(reason.figure, reason.q): reason for reason in frame.why.reasons}
    assert reasons["ttft", 50].kind == "queue-bound" and "queue 70%" in reasons["ttft", 50].sentence
    assert reasons["ttft", 95].kind == "cannot tell", "40 requests have no p95"
    assert frame.steady.steady and frame.steady.age_s == pytest.approx(2.1, abs=0.5)


def test_another_rate_begins_the_answers_anew(session: LiveSession, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic_ns()
    session.watch.state = state_of(Layout(tp=2))
    run_on(session)
    monkeypatch.setattr(session._driver, "set_rate", lambda rate: None)
    session._recent.extend(told(index, now, queue_ms=70.0) for index in range(40))
    assert frame_of(session.snapshot()).why is not None
    session.set_rate(8)
    frame = frame_of(session.snapshot())
    assert frame.why is None and frame.steady is None and frame.run.ttft_ms.n == 0


def test_a_failure_is_shown_until_the_ranks_are_ready_again(session: LiveSession) -> None:
    session.watch._on_state({**state_of(Layout()), "state": "restarting"})
    session.watch._on_failure({"rank": 1, "kind": "killed", "error": "killed by signal 9", "traceback": ""})
    lab = frame_of(session.snapshot()).lab
    assert lab is not None and lab.failure is not None and lab.failure.rank == 1
    session.watch._on_state(state_of(Layout()))
    lab = frame_of(session.snapshot()).lab
    assert lab is not None and lab.failure is None


def test_remarks_are_those_that_matter_and_no_panel_tells(session: LiveSession) -> None:
    snapshot = session.snapshot()
    snapshot["quality"] = [
        {"code": "schedule", "severity": "ok", "sentence": "kept"},
        {"code": "samples", "severity": "warn", "sentence": "few"},
        {"code": "client-lag", "severity": "bad", "sentence": "late"},
    ]
    assert [(v.code, v.severity) for v in frame_of(snapshot).quality] == [("client-lag", "error")]
