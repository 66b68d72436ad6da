"""Where a run stopped drifting, by streams whose answer is known: calm, cold at first, and beyond what is served."""

from __future__ import annotations

import random

from labkit.measure.metrics import Window
from labkit.measure.steady import steady_state
from tests.measure.make import request


def _stream(waits_ms: list[float], gap_ms: float = 100) -> list:
    return [request(i * gap_ms, (i * gap_ms + wait,), index=i) for i, wait in enumerate(waits_ms)]


def _found(records: list) -> dict:
    return steady_state(records, Window.of(records))


def test_a_calm_run_is_steady_from_the_first_request():
    draw = random.Random(1)
    found = _found(_stream([draw.uniform(20, 60) for _ in range(300)]))
    assert found["steady"] and found["settling_s"] == 0 and found["start_s"] == 0
    assert found["sentence"] == "Steady from 0.0 s to 29.9 s." and abs(found["growth_per_s"]) < 0.05


def test_a_cold_start_is_cut_off_and_not_much_more():
    draw = random.Random(2)
    found = _found(_stream([draw.uniform(300, 400) if i < 90 else draw.uniform(20, 60) for i in range(240)]))
    assert found["steady"] and 3.0 < found["settling_s"] <= 9.0


def test_a_queue_beyond_what_is_served_never_is_and_the_rate_of_its_growth_is_told():
    """10 requests/s come, and 5/s leave: one every 200 ms."""
    found = _found(_stream([(i + 1) * 200 - i * 100 for i in range(200)]))
    assert found["steady"] is False and found["why"] == "queue"
    assert abs(found["growth_per_s"] - 5) < 0.3
    assert "the queue grows by 5 requests/s" in found["sentence"]


def test_a_closed_loop_whose_answers_become_slower_drifts_without_a_queue():
    found = _found([request(i * 100, (i * 100 + 20 + i,), index=i) for i in range(200)])
    assert found["why"] == "drift" and "TTFT drifts" in found["sentence"]


def test_a_run_too_short_for_its_answers_is_told_from_a_queue():
    """TTFT stays, and an answer takes as long as the run: nothing leaves."""
    records = [request(i * 100, (i * 100 + 40, i * 100 + 9_000), index=i) for i in range(100)]
    found = _found(records)
    assert found["why"] == "filling" and "an answer takes 9.0 s of a window of 9.9 s" in found["sentence"]


def test_warm_up_and_drain_stand_apart():
    records = _stream([40.0] * 100)
    for record in records[:20]:
        record.warmup = True
    records[-1].last_ns += 3_000_000_000
    found = _found(records)
    assert found["warmup_s"] == 2.0 and found["start_s"] == 2.0 and 3.0 < found["drain_s"] < 3.1


def test_a_warm_up_without_a_request_does_not_make_instants_negative():
    records = _stream([40.0] * 100)
    found = steady_state(records, Window(-500_000_000, records[-1].scheduled_ns))
    assert found["start_s"] == 0 and found["warmup_s"] == 0


def test_too_few_requests_cannot_tell():
    found = _found(_stream([40.0] * 23))
    assert found["steady"] is None and "23 requests, and 24 are the least" in found["sentence"]
    assert _found([])["steady"] is None
