"""The live figures are the whole run's, over fewer requests, and cheap enough for eight frames a second."""

from __future__ import annotations

import time

import numpy as np
import pytest

from labkit.measure.breakdown import step_share, summarize_ttft
from labkit.measure.metrics import Objective, Window, is_good, summarize
from labkit.measure.window import SlidingWindow, StepMeter
from tests.measure.make import MS, request, server_times, step

OBJECTIVE = Objective(ttft_ms=60, tpot_ms=12)


def _records(n: int = 200, tokens: int = 20) -> list:
    rng = np.random.default_rng(3)
    records = []
    for i in range(n):
        at = i * 10.0
        chunks = at + rng.uniform(20, 100) + np.cumsum(rng.uniform(5, 20, tokens))
        record = request(at, tuple(chunks), index=i, status="failed" if i % 17 == 5 else "completed")
        record.server = server_times(record, {"network": 1, "queue": 3, "compute": 5, "delivery": 1})
        records.append(record)
    return records


def _window(records: list, **options) -> tuple[SlidingWindow, int]:
    window = SlidingWindow(**options)
    window.start(0)
    for record in records:
        window.add(record)
    return window, max(record.end_ns for record in records) + 1


def test_a_window_over_everything_agrees_with_the_whole_run():
    records = _records()
    window, now = _window(records, seconds=1000)
    live, whole = window.snapshot(now, OBJECTIVE), summarize(records, OBJECTIVE)
    for name in ("ttft_ms", "tpot_ms", "e2el_ms"):
        assert live[name] == whole[name]
    assert live["goodput"]["attainment"] == whole["goodput"]["attainment"]
    assert live["goodput"]["attainment_interval"] == whole["goodput"]["attainment_interval"]
    assert live["requests"]["failed"] == whole["requests"]["failed"]
    parts = summarize_ttft(records)
    assert live["ttft_parts_ms"] == pytest.approx(parts["ttft_parts_ms"])
    assert live["ttft_parts"]["n"] == parts["ttft_parts"]["n"]


def test_only_the_last_seconds_count():
    early, late = request(0, (50, 60), index=0), request(30_000, (30_070, 30_090), index=1)
    window, now = _window([early, late], seconds=20)
    live = window.snapshot(now)
    assert live["ttft_ms"]["n"] == 1 and live["ttft_ms"]["p50"] == 70
    assert live["throughput"]["output_tokens_per_s"] == pytest.approx(2 / 20)


def test_after_a_switch_earlier_requests_belong_to_no_ladder_but_stay_in_the_series():
    window = SlidingWindow()
    window.start(0)
    window.add(request(0, (50, 60), index=0))
    window.reset(2000 * MS)
    across = request(1990, (2500, 2600), index=1)  # asked before the layout was ready
    moved = request(1000, (2500, 2600), index=2)
    moved.server = server_times(moved, {}, requeued=True)
    for record in (across, moved, request(2100, (2140, 2150), index=3)):
        window.add(record)
    live = window.snapshot(4000 * MS)
    assert live["ttft_ms"]["n"] == 1 and live["ttft_ms"]["p50"] == 40
    assert live["requests"]["requeued"] == 1
    assert live["span_s"] == 2.0
    assert live["series"]["requests"] == [1, 0, 2, 0]


def test_the_objective_can_be_dragged():
    records = _records()
    window, now = _window(records, seconds=1000)
    for limits in (Objective(40, None), Objective(80, 15), Objective(None, 13), Objective()):
        good = sum(is_good(record, limits) for record in records)
        assert window.snapshot(now, limits)["goodput"]["good"] == good


def test_answers_of_one_and_of_no_token_in_the_window():
    window, now = _window([request(0, (50,), index=0), request(10, (), index=1, end_ns=20 * MS)])
    assert window.snapshot(now, Objective(ttft_ms=100))["goodput"]["good"] == 1
    assert window.snapshot(now, Objective(tpot_ms=100))["goodput"]["good"] == 0
    assert window.snapshot(now)["tpot_ms"]["n"] == 0


def test_the_series_counts_tokens_where_they_arrived():
    window, now = _window([request(0, (900, 1100, 2500), (1, 2, 3))])
    series = window.snapshot(4000 * MS)["series"]
    assert series["t_s"] == [0, 1, 2, 3]
    assert series["output_tokens"] == [1, 2, 3, 0]
    assert series["input_tokens"] == [0, 0, 10, 0]
    assert series["good"] == [0, 0, 1, 0]


def test_the_table_is_bounded():
    window, now = _window(_records(300), seconds=1000, capacity=64)
    assert window.snapshot(now)["requests"]["ended"] == 64


@pytest.mark.slow
def test_a_snapshot_is_cheap():
    """2000 requests: under 2 ms, taken from the better half of several tries on a shared machine."""
    window, now = _window(_records(2000, tokens=50), seconds=1000)
    times = []
    for _ in range(30):
        begin = time.perf_counter_ns()
        window.snapshot(now, OBJECTIVE)
        times.append(time.perf_counter_ns() - begin)
    assert np.percentile(times, 25) < 2_000_000


def test_the_step_meter_agrees_with_the_shares_of_the_whole():
    steps = [
        step(i * 10, i * 10 + 9, [5, 6], [1, 0], [2, 2], prefill=i % 3 == 0, decode=2, step_id=i)
        for i in range(100)
    ]
    meter = StepMeter(seconds=1.0)
    meter.add(steps)
    live, whole = (
        meter.snapshot(1000 * MS, ranks=[0, 1])["step_share"],
        step_share(steps[10:], Window(100 * MS, 1000 * MS)),
    )
    for name in ("compute", "wait", "transfer", "idle"):
        assert live[name] == pytest.approx(whole[name])
        assert live["by_rank"][1][name] == pytest.approx(whole["by_rank"][1][name])
        assert live["by_phase"]["decode"][name] == pytest.approx(whole["by_phase"]["decode"][name])


def test_the_step_meter_forgets_and_starts_anew():
    meter = StepMeter(seconds=1.0)
    meter.add([step(0, 100, [100], [0], [0])])
    assert meter.snapshot(500 * MS)["steps"]["decode_tokens_per_s"] == pytest.approx(1 / 0.5)
    assert meter.snapshot(5000 * MS)["step_share"]["by_rank"] == []
    meter.reset(6000 * MS)
    meter.add([step(5000, 6100, [1], [0], [0])])  # of the layout before
    assert meter.snapshot(7000 * MS)["steps"]["per_s"] == 0


def test_a_load_that_begins_in_a_moment_has_no_series_yet():
    window = SlidingWindow()
    window.start(1_000 * MS)
    figures = window.snapshot(950 * MS, OBJECTIVE)
    assert figures["series"]["t_s"] == [] and figures["requests"]["ended"] == 0
