"""Every figure against a list done by hand."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from labkit.measure import metrics
from labkit.measure.metrics import Objective, Window, summarize
from labkit.measure.statistics import few, ladder, percentile, wilson_interval
from tests.measure.make import MS, request, server_times


def test_the_percentile_is_linear_not_the_floor_index():
    assert percentile(range(1, 11), 90) == pytest.approx(9.1)  # floor index gives 10
    assert percentile([7.0], 99) == 7.0
    assert percentile([], 50) is None
    assert percentile([10.0, 0.0], 50) == 5.0
    samples = np.random.default_rng(0).exponential(size=1000)
    assert percentile(samples, 99) == pytest.approx(np.percentile(samples, 99))


def test_a_percentile_that_touches_a_failure_is_infinite():
    assert percentile([1.0, 2.0, math.inf], 50) == 2.0
    assert percentile([1.0, 2.0, math.inf], 51) == math.inf
    assert percentile([1.0, math.inf, math.inf], 100) == math.inf


@pytest.mark.parametrize(
    ("n", "marked"),
    [
        (12, ["p50", "p90", "p95", "p99"]),
        (20, ["p90", "p95", "p99"]),
        (100, ["p95", "p99"]),
        (999, ["p99"]),
        (1000, []),
    ],
)
def test_percentiles_with_fewer_than_ten_samples_beyond_are_marked(n: int, marked: list[str]):
    assert few(n) == marked
    assert ladder([1.0] * n)["few"] == marked
    assert ladder([1.0] * n)["n"] == n


def test_the_wilson_interval():
    low, high = wilson_interval(8, 10)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert wilson_interval(10, 10) == (pytest.approx(0.7225, abs=1e-4), pytest.approx(1.0))
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_ttft_counts_from_the_scheduled_arrival():
    late = request(at_ms=100, chunks_ms=(180, 190), late_ms=50)
    assert metrics.ttft_ms(late) == 80
    assert summarize([late])["lateness_ms"]["mean"] == 50


def test_tpot_is_over_the_gaps_and_needs_two_tokens():
    assert metrics.tpot_ms(request(0, (50, 60, 70, 80))) == 10
    assert metrics.tpot_ms(request(0, (50,))) is None
    assert metrics.tpot_ms(request(0, ())) is None
    assert metrics.tpot_ms(request(0, (50,), (4,))) is None  # one chunk: no time passed that could be told


def test_actual_tokens_never_the_requested_number():
    record = request(0, (50, 60, 70), asked_output_tokens=200)
    assert metrics.tpot_ms(record) == 10
    assert metrics.num_tokens(request(0, (50, 60), n=0)) == 2  # no usage: what the chunks bore


def test_itl_is_per_token_and_sums_to_last_minus_first():
    record = request(0, (50, 60, 80, 81), (1, 1, 4, 1))
    assert metrics.itl_ms(record) == [10, 5, 5, 5, 5, 1]
    assert metrics.icl_ms(record) == [10, 20, 1]
    assert sum(metrics.itl_ms(record)) == 31
    assert metrics.tpot_ms(record) * (7 - 1) == pytest.approx(31)
    assert 50 not in metrics.itl_ms(record)  # the first token's delay is TTFT's


def test_a_chunk_without_tokens_is_no_sample():
    record = request(0, (50, 55, 60), (1, 0, 1))
    assert metrics.itl_ms(record) == [10]


def test_one_token_answers_are_counted_and_judged_by_ttft_alone():
    one, none = request(0, (50,), index=1), request(0, (), index=2)
    summary = summarize([one, none, request(0, (50, 60), index=3)], Objective(100, 5))
    assert summary["requests"]["one_token"] == 1 and summary["requests"]["no_token"] == 1
    assert summary["tpot_ms"]["n"] == 1
    assert metrics.is_good(one, Objective(ttft_ms=100, tpot_ms=5))
    assert not metrics.is_good(one, Objective(tpot_ms=5))  # nothing to judge: a TPOT of 0 must not pass
    assert not metrics.is_good(none, Objective(ttft_ms=100))
    assert not metrics.is_good(request(0, (50, 60)), Objective(100, 5))


def test_failures_are_counted_apart_and_are_misses():
    good = [request(i * 100, (i * 100 + 50, i * 100 + 60), index=i) for i in range(8)]
    bad = [
        request(200, (230, 240), index=8, status="cancelled"),
        request(300, (), index=9, status="failed", error="gone"),
        request(400, (), index=10, status="refused"),
        request(500, (), index=11, status="unsent", sent_ns=0),
    ]
    summary = summarize(good + bad, Objective(ttft_ms=60))
    counts = summary["requests"]
    assert (counts["scheduled"], counts["completed"]) == (12, 8)
    assert [counts[name] for name in ("failed", "refused", "cancelled", "unsent")] == [1, 1, 1, 1]
    assert summary["ttft_ms"]["n"] == 8 and summary["ttft_ms"]["p50"] == 50
    adjusted = summary["ttft_ms"]["adjusted"]
    assert adjusted["n"] == 12 and adjusted["p50"] == 50 and adjusted["p90"] is None
    assert summary["goodput"]["attainment"] == pytest.approx(8 / 12)
    assert summary["goodput"]["requests_per_s"] == pytest.approx(8 / 0.7)
    assert summary["goodput"]["attainment_interval"] == list(wilson_interval(8, 12))


def test_the_window_leaves_warm_up_and_drain_out_of_the_rates():
    warm = request(0, (500, 1500), index=0, warmup=True)  # one token inside the window
    inside = request(1000, (1100, 1900), index=1)
    drained = request(2000, (2100, 2900, 5000), index=2)
    summary = summarize([warm, inside, drained])
    assert summary["window"]["seconds"] == 1.0  # 1000 to 2000 ms
    assert summary["throughput"] == {
        "requests_per_s": 2.0,  # the warm-up's last token and the second request's
        "input_tokens_per_s": 10.0,
        "output_tokens_per_s": 3.0,
    }
    assert summary["drain"] == {"seconds": 3.0, "requests": 1, "output_tokens": 3}
    assert summary["ttft_ms"]["n"] == 2
    assert summary["requests"]["warmup"] == 1


def test_requeued_requests_are_in_no_figure_and_counted():
    moved = request(0, (900, 1000), index=1)
    moved.server = server_times(moved, {}, requeued=True)
    summary = summarize([request(0, (50, 60)), moved, request(1000, (1050, 1060), index=2)])
    assert summary["requests"]["requeued"] == 1 and summary["requests"]["scheduled"] == 2
    assert summary["ttft_ms"]["mean"] == 50


def test_every_request_is_accounted_for():
    records = [request(i * 10, (i * 10 + 5,), index=i, warmup=i < 3) for i in range(20)]
    records[7].server = server_times(records[7], {}, requeued=True)
    counts = summarize(records)["requests"]
    assert counts["scheduled"] + counts["requeued"] + counts["warmup"] == 20


def test_an_empty_run_has_no_figures_and_does_not_fall():
    summary = summarize([])
    assert summary["ttft_ms"]["p50"] is None and summary["ttft_ms"]["n"] == 0
    assert summary["throughput"]["requests_per_s"] is None
    assert b"NaN" not in msgspec.json.encode(summary)


def test_the_summary_is_plain_json():
    summary = summarize(
        [request(i * 100, (i * 100 + 50, i * 100 + 60), index=i) for i in range(5)], Objective(60, 20)
    )
    assert msgspec.json.decode(msgspec.json.encode(summary)) == summary


def test_a_window_can_be_given():
    records = [request(i * 100, (i * 100 + 50,), index=i) for i in range(10)]
    assert summarize(records, window=Window(200 * MS, 500 * MS))["requests"]["scheduled"] == 4


@pytest.mark.parametrize(
    ("text", "objective"),
    [
        ("ttft=500,tpot=50", Objective(500, 50)),
        ("TPOT=50ms", Objective(None, 50)),
        ("ttft_ms = 200", Objective(200)),
        ("", Objective()),
    ],
)
def test_objectives_are_parsed(text: str, objective: Objective):
    assert Objective.parse(text) == objective


@pytest.mark.parametrize("text", ["ttft", "latency=5", "ttft=fast", "ttft=-3", "ttft=nan"])
def test_bad_objectives_get_a_sentence(text: str):
    with pytest.raises(ValueError, match=r"ttft.*\."):
        Objective.parse(text)
