"""A result says what is wrong with it, in a sentence, and says nothing when nothing is."""

from __future__ import annotations

from labkit.measure.metrics import Objective, Window
from labkit.measure.quality import Circumstances, trusted, verdicts, worst
from labkit.measure.records import Environment
from tests.measure.make import request, server_times

ALWAYS = {"client-lag", "schedule", "warm-cache", "samples", "ranks-and-cores"}


def _run(n: int = 1200, **fields) -> list:
    return [request(i * 50, (i * 50 + 40, i * 50 + 50), index=i, late_ms=0.2, **fields) for i in range(n)]


def _environment(**fields) -> Environment:
    values = {
        "host": "h", "backend": "cpu", "fabric": "shm", "device": "cpu", "num_cores": 4, "num_ranks": 2,
        "threads_per_rank": 1, "dtype": "float32", "versions": {}, "seed": 0, "started_at": "",
    }  # fmt: skip
    return Environment(**(values | fields))


def _verdicts(records, **about) -> dict[str, dict]:
    found = verdicts(records, Window.of(records), Circumstances(**about))
    return {verdict["code"]: verdict for verdict in found}


def test_a_good_run_is_all_ok_and_says_what_was_looked_at():
    found = _verdicts(_run(), objective=Objective(100, 20), environment=_environment())
    assert set(found) == ALWAYS
    assert {verdict["severity"] for verdict in found.values()} == {"ok"}
    assert all(verdict["sentence"].endswith(".") for verdict in found.values())


def test_a_client_later_than_a_tenth_of_an_objective_cannot_be_trusted():
    records = _run()
    for record in records[::20]:
        record.sent_ns = record.scheduled_ns + 15_000_000
    found = _verdicts(records, objective=Objective(ttft_ms=100))
    assert found["client-lag"]["severity"] == "bad" and "not to be trusted" in found["client-lag"]["sentence"]
    assert not trusted(list(found.values()))
    assert trusted(list(_verdicts(records, objective=Objective(ttft_ms=200)).values()))


def test_a_schedule_that_was_not_kept_is_told():
    records = _run(200)
    for i, record in enumerate(records):
        record.sent_ns = record.scheduled_ns + i * 1_000_000  # a little later each time
    assert _verdicts(records)["schedule"]["severity"] == "warn"
    records[-1].status, records[-1].sent_ns = "unsent", 0
    assert _verdicts(records)["schedule"]["severity"] == "bad"


def test_a_warm_cache_is_told_unless_it_is_the_subject():
    records = _run(cached_tokens=8)
    assert _verdicts(records)["warm-cache"]["severity"] == "warn"
    assert _verdicts(records, sharing_expected=True)["warm-cache"]["severity"] == "info"


def test_too_few_samples_are_told_with_their_names():
    sentence = _verdicts(_run(12))["samples"]["sentence"]
    assert "12" in sentence and "p50, p90, p95, p99" in sentence
    assert "p99" in _verdicts(_run(500))["samples"]["sentence"]


def test_more_threads_than_cores_make_speed_meaningless():
    crowded = _environment(num_ranks=4, threads_per_rank=2)
    assert _verdicts(_run(), environment=crowded)["ranks-and-cores"]["severity"] == "warn"
    assert (
        _verdicts(_run(), environment=_environment(backend="cuda", num_ranks=8))["ranks-and-cores"][
            "severity"
        ]
        == "ok"
    )


def test_failures_are_counted_by_kind_with_the_first_error():
    records = _run(100)
    records[3].status, records[3].error = "failed", "rank 1 was killed"
    records[5].status = "refused"
    sentence = _verdicts(records)["failures"]["sentence"]
    assert "1 failed, 1 refused" in sentence and "rank 1 was killed" in sentence


def test_requests_of_others_and_requeued_ones_are_told():
    records = _run(100)
    records[7].server = server_times(records[7], {}, requeued=True)
    found = _verdicts(records, num_foreign=3, stopped_early=True)
    assert (
        found["foreign-requests"]["severity"] == "bad"
        and "3 requests" in found["foreign-requests"]["sentence"]
    )
    assert found["requeued"]["severity"] == "info"
    assert found["stopped"]["severity"] == "warn"


def test_a_queue_that_grows_is_not_steady():
    growing = [request(i * 50, (i * 50 + 40 + i * 10, i * 50 + 90 + i * 10), index=i) for i in range(60)]
    assert _verdicts(growing)["not-steady"]["severity"] == "warn"
    assert "not-steady" not in _verdicts(_run(60))


def test_prompts_of_another_length_than_asked_are_told():
    assert "prompt-length" in _verdicts(_run(50, asked_prompt_tokens=20))
    assert "prompt-length" not in _verdicts(_run(50, asked_prompt_tokens=10))


def test_unaccounted_time_and_foreign_clocks_are_told():
    records = _run(50)
    for record in records:
        record.server = server_times(record, {"queue": 10, "compute": 20, "delivery": 1})
    assert "unaccounted" in _verdicts(records)
    for record in records:
        record.server = server_times(record, {}, received_ns=1)
    assert "clocks" in _verdicts(records[1:])


def test_a_run_without_requests_has_no_figure():
    found = verdicts([], Window(0, 0))
    assert [verdict["code"] for verdict in found] == ["no-requests"] and worst(found) == "bad"
