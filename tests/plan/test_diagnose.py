"""What is short, by runs whose limit was put in; and what is not told is not guessed."""

from __future__ import annotations

import pytest

from labkit.plan.diagnose import diagnose
from labkit.plan.findings import NOT_MEASURED, RESOURCES
from labkit.plan.objective import PlanObjective
from tests.plan.made_runs import DECODE, TTFT, made_run

FAST = PlanObjective(ttft_ms=300.0, tpot_ms=50.0)


def found(run, objective=FAST, **more):
    return diagnose(run.summary, objective, run=run, **more)


def test_nothing_missed_is_said_with_what_is_nearest_to_its_limit():
    told = found(made_run())
    assert (told.resource, told.metric, told.load) == ("none", "", "")
    assert "TTFT p95" in told.sentence  # 100 of 300 ms is nearer than 10 of 50
    assert {finding.resource for finding in told.findings} == set(RESOURCES)


def test_a_queue_is_looked_at_before_the_work_and_told_by_what_it_waits_for():
    waits = {**TTFT, "queue": 500.0, "compute": 320.0}  # its own work would miss 300 ms too
    kv = found(made_run(ttft=waits, preemptions=1))
    assert (kv.metric, kv.resource, kv.cause, kv.load) == ("ttft", "KV memory", "kv-full", "high")
    slots = found(made_run(ttft=waits, seqs=64))
    assert (slots.resource, slots.cause) == ("queue", "max_num_seqs")
    room = found(made_run(ttft=waits, seqs=4))
    assert (room.resource, room.cause) == ("KV memory", "kv-full")
    assert "had room" in room.sentence


def test_steps_in_which_nobody_waited_do_not_tell_what_the_queue_waits_for():
    """Full only while somebody waited: it is places in a step that are short, however many steps were empty."""
    run = made_run(ttft={**TTFT, "queue": 500.0}, seqs=4)
    for record in run.records[60:]:  # an overload at the beginning, then nobody waits
        record.server.first_start_ns = record.server.received_ns
    for step in run.step_records[:70]:
        step.num_decode_seqs = 64
    assert found(run).cause == "max_num_seqs"


def test_without_a_queue_the_work_is_short_already_at_low_load():
    told = found(made_run(ttft={**TTFT, "compute": 400.0}, prompts=0.0))
    assert (told.metric, told.resource, told.load) == ("ttft", "compute", "low")
    assert told.finding("queue").state == "enough"
    assert told.finding("memory bandwidth").state == NOT_MEASURED  # no roofs
    assert "labkit bench device" in told.finding("memory bandwidth").measure


def test_a_slow_token_is_a_matter_of_reading_or_of_prompts_in_its_steps():
    slow = {**DECODE, "compute": 90.0}
    alone = found(made_run(decode=slow, prompts=0.0, num_tokens=3))
    assert (alone.metric, alone.resource, alone.cause) == ("tpot", "memory bandwidth", "work")
    beside = found(made_run(decode=slow, prompts=0.9, num_tokens=3))
    assert (beside.cause, beside.load) == ("interference", "high")


def test_traffic_between_ranks_is_named():
    told = found(made_run(decode={**DECODE, "compute": 20.0, "transfer": 80.0}, prompts=0.0, num_tokens=3))
    assert (told.metric, told.resource, told.cause) == ("tpot", "communication", "transfer")


def test_a_low_run_beside_it_tells_at_which_load_it_fails():
    slow = made_run(ttft={**TTFT, "compute": 400.0}, prompts=0.0)
    assert found(slow, low_load=made_run().summary).load == "high"
    assert found(slow, low_load=slow.summary).load == "low"


def foreign(**more):
    """What another load client's file leaves: latencies, and nothing of the server."""
    run = made_run(ttft={**TTFT, "queue": 900.0})
    for record in run.records:
        record.server = None
    run.step_records.clear()
    kept = {"settings": {}, "memory_bytes": [], "layout": None, "step_share": {},
            "engine": {"name": "unknown", "imported": {"tool": "vllm bench serve", "file": "r.json"}}}  # fmt: skip
    return {**run.summary, **kept, **more}


def test_of_an_imported_run_the_limit_is_not_measured_and_the_run_that_would_is_named():
    told = diagnose(foreign(), FAST)
    assert (told.metric, told.resource, told.source) == ("ttft", NOT_MEASURED, "vllm bench serve")
    assert any("--concurrency 1" in run for run in told.measure)
    assert told.finding("KV memory").state == NOT_MEASURED


def test_one_request_at_a_time_waits_for_nobody():
    told = diagnose(foreign(concurrency=1), FAST)
    assert (told.metric, told.cause, told.load) == ("ttft", "work", "low")
    assert told.finding("queue").state == "enough"


def test_prompts_that_share_their_steps_do_not_tell_the_low_end():
    run = made_run(ttft={**TTFT, "compute": 400.0}, prompts=0.2)
    for step in run.step_records:
        step.num_prefill_seqs *= 4
    assert found(run).load == NOT_MEASURED


def test_an_engine_s_own_gauges_tell_queue_and_kv():
    gauges = {"waiting": {"mean": 12.0, "max": 40.0}, "running": {"mean": 60.0, "max": 64.0}, "preemptions": 0.0}
    engine = {"name": "vllm", "version": "0.32.0"}
    full = diagnose(foreign(engine={**engine, "metrics": {**gauges, "kv_use": {"mean": 0.8, "max": 0.99}}}), FAST)
    assert (full.resource, full.source) == ("KV memory", "vllm")
    spare = diagnose(foreign(engine={**engine, "metrics": {**gauges, "kv_use": {"mean": 0.2, "max": 0.3}}}), FAST)
    assert spare.resource == "queue"
    assert spare.finding("KV memory").state == "enough"


def test_the_server_s_tokens_are_not_short_where_nobody_asks_for_more():
    run = made_run()
    told = found(run, PlanObjective(server_tokens_per_s=1e6))
    assert (told.metric, told.cause) == ("server_tokens", "too little load")


def test_what_cannot_be_diagnosed_gets_a_sentence():
    with pytest.raises(ValueError, match="Nothing is asked"):
        diagnose(made_run().summary, PlanObjective())
    with pytest.raises(ValueError, match="no latencies"):
        diagnose({"ttft_ms": {"n": 0}}, FAST)
    with pytest.raises(ValueError, match="above 0"):
        PlanObjective(ttft_ms=-1.0)


def test_a_diagnosis_is_json():
    import json

    told = json.loads(json.dumps(found(made_run(ttft={**TTFT, "queue": 900.0})).to_dict()))
    assert set(told) >= {"metric", "resource", "cause", "load", "sentence", "findings", "measure", "outcomes"}
