"""What an engine says on /metrics, and what a run's readings come down to."""

from __future__ import annotations

import pytest

from labkit.load.engine_metrics import EngineMetrics, Sampler, parse_metrics, read_figures

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="a{{odd}} name"}} {running}
vllm:num_requests_running{{engine="1",model_name="a{{odd}} name"}} 1.0
vllm:num_requests_waiting{{engine="0",model_name="m"}} 3.0
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.25
vllm:kv_cache_usage_perc{{engine="1",model_name="m"}} 0.75
vllm:num_preemptions_total{{engine="0",model_name="m"}} {preempted}
vllm:generation_tokens_total{{engine="0",model_name="m"}} 1.2e+03
vllm:time_to_first_token_seconds_bucket{{le="+Inf"}} 7
process_start_time_seconds 1.7e+09 1700000000
this is no sample
"""
SGLANG = """\
sglang:num_running_reqs{model_name="m",tp_rank="0"} 8.0
sglang:num_queue_reqs{model_name="m"} 4.0
sglang:token_usage{model_name="m"} 0.52
"""


def test_samples_by_name_over_all_labels():
    found = parse_metrics(VLLM.format(running="2.0", preempted="0.0"))
    assert found["vllm:num_requests_running"] == [2.0, 1.0]
    assert found["vllm:generation_tokens_total"] == [1200.0]
    assert found["process_start_time_seconds"] == [1.7e9]
    assert "this" not in found


def test_replicas_are_added_up_but_the_fullest_cache_counts():
    figures = read_figures("vllm", parse_metrics(VLLM.format(running="2.0", preempted="5.0")))
    assert (figures["running"], figures["waiting"], figures["kv_use"], figures["preemptions"]) == (3.0, 3.0, 0.75, 5.0)
    assert "prefix_hits" not in figures


def test_sglang_has_words_of_its_own():
    assert read_figures("sglang", parse_metrics(SGLANG)) == {"running": 8.0, "waiting": 4.0, "kv_use": 0.52}


def test_gauges_become_mean_and_maximum_and_counters_what_the_run_added():
    metrics = EngineMetrics("vllm")
    for running, preempted in (("1.0", "5.0"), ("4.0", "6.0"), ("1.0", "9.0")):
        metrics.add(VLLM.format(running=running, preempted=preempted))
    metrics.add("nothing of interest")
    summary = metrics.summary()
    assert summary["running"] == {"mean": pytest.approx(3.0), "max": 5.0}
    assert summary["preemptions"] == 4.0 and summary["generation_tokens"] == 0.0
    assert summary["prefix_hits"] is None
    assert (summary["num_samples"], summary["num_missed"]) == (3, 1)


def test_a_counter_that_appears_during_the_run_began_at_nothing():
    metrics = EngineMetrics("vllm")
    metrics.add("vllm:num_requests_running 1")
    metrics.add("vllm:num_requests_running 1\nvllm:num_preemptions_total 2")
    assert metrics.summary()["preemptions"] == 2.0


def test_the_sampler_reads_at_both_ends_and_survives_a_server_that_does_not_answer():
    answers = iter(["vllm:num_requests_waiting 1"])

    def fetch() -> str:
        try:
            return next(answers)
        except StopIteration:
            raise OSError("gone") from None

    with Sampler("vllm", fetch, interval_s=60) as sampler:
        pass
    assert sampler.metrics.summary()["waiting"] == {"mean": 1.0, "max": 1.0}
    assert sampler.metrics.num_missed == 1
