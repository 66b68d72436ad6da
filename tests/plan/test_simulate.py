"""The simulator's figures, its command, and what it takes for granted nowhere."""

from __future__ import annotations

import json

import numpy as np
import pytest
from stepping import Affine
from typer.testing import CliRunner

from labkit.cli import app
from labkit.layout.deployment import read_layout
from labkit.measure.metrics import Objective
from labkit.plan.sim.load import trace_requests, workload_requests
from labkit.plan.sim.result import Series
from labkit.plan.simulate import Options, SimRequest, simulate
from labkit.plan.simulate_command import bar
from labkit.plan.work import EngineSettings


class Flat(Affine):
    """Every step takes a second."""

    def seconds(self, work):
        return 1.0


def _run(requests, layout="tp1", cost=None, blocks=1000, settings=None, **others):
    return simulate(requests, read_layout(layout), cost or Flat(), blocks, settings or EngineSettings(), **others)


def test_steps_of_a_second_give_whole_seconds():
    result = _run([SimRequest(0.0, 100, 5), SimRequest(0.5, 100, 1), SimRequest(9.0, 10, 3)])
    assert result.ttft_s.tolist() == pytest.approx([1.0, 1.5, 1.0])
    assert result.finished_s.tolist() == pytest.approx([5.0, 2.0, 12.0])
    assert result.tpot_s[[0, 2]].tolist() == pytest.approx([1.0, 1.0]) and np.isnan(result.tpot_s[1])
    assert result.queue_s.tolist() == pytest.approx([0.0, 0.5, 0.0])
    assert result.num_steps == 8


def test_a_prompt_longer_than_a_step_is_cut_into_chunks():
    settings = EngineSettings(max_num_batched_tokens=256)
    assert _run([SimRequest(0.0, 600, 1)], settings=settings).ttft_s.tolist() == [3.0]


def test_planning_ahead_shows_an_arrival_to_the_step_after_the_next():
    requests = [SimRequest(0.0, 10, 20), SimRequest(2.5, 10, 2)]
    plain, ahead = (_run(requests, options=Options(ahead=how)) for how in (False, True))
    assert plain.first_s[1] == pytest.approx(4.0)
    assert ahead.seen_s[1] == pytest.approx(3.0) and ahead.first_s[1] == pytest.approx(5.0)
    stepped = _run(requests, options=Options(ahead=True, jump=False))
    np.testing.assert_allclose(stepped.finished_s, ahead.finished_s)


@pytest.mark.parametrize("seed", range(8))
def test_planning_ahead_jumped_is_planning_ahead_stepped(seed):
    draw = np.random.default_rng(seed)
    at = np.cumsum(draw.exponential(0.02, 80))
    requests = [SimRequest(float(t), int(draw.integers(1, 150)), int(draw.integers(1, 60))) for t in at]
    settings = EngineSettings("labkit" if seed % 2 else "vllm", 96, 8, 4)
    layout = "dp2xep2" if seed % 3 == 0 else "tp1"
    how = {"layout": layout, "cost": Affine(), "blocks": 100, "settings": settings}
    jumped, stepped = (_run(requests, **how, options=Options(ahead=True, jump=jump)) for jump in (True, False))
    np.testing.assert_allclose(jumped.finished_s, stepped.finished_s, rtol=0, atol=1e-9)
    np.testing.assert_allclose(jumped.seen_s, stepped.seen_s, rtol=0, atol=1e-9)
    assert (jumped.num_steps, jumped.num_preemptions) == (stepped.num_steps, stepped.num_preemptions)


def test_shared_beginnings_are_computed_once():
    requests = [SimRequest(10.0 * i, 120, 3, (7,), 100) for i in range(5)]
    result = _run(requests, cost=Affine())
    assert result.cached_tokens == 4 * 96  # whole blocks of 16
    assert result.ttft_s[1] < 0.9 * result.ttft_s[0]
    off = _run(requests, cost=Affine(), settings=EngineSettings(enable_prefix_caching=False))
    assert off.cached_tokens == 0


def test_replicas_that_share_experts_know_the_mean_of_a_step():
    asked = []

    class Asks(Flat):
        def seconds(self, work):
            asked.append((work.prefill_tokens, work.decodes, work.shared_rows))
            return 1.0

    _run([SimRequest(0.0, 100, 3), SimRequest(0.5, 60, 2)], "dp2xep2", Asks())
    assert (100, 0, 50.0) in asked  # the other replica idles along
    assert (60, 0, 30.5) in asked and (0, 1, 30.5) in asked  # a prompt beside a decode
    asked.clear()
    _run([SimRequest(0.0, 100, 3), SimRequest(0.5, 60, 2)], "dp2", Asks())
    assert {mean for _, _, mean in asked} == {0.0}


def test_what_can_never_be_served_is_refused_and_told():
    result = _run([SimRequest(0.0, 50, 5), SimRequest(0.0, 50, 500)], blocks=10)
    assert list(result.refused) == [1] and "KV blocks" in result.refused[1]
    assert result.summary()["completed"] == 1


def test_a_closed_loop_keeps_so_many_in_flight():
    result = _run([SimRequest(0.0, 10, 10)] * 12, concurrency=3)
    assert result.arrival_s.tolist() == pytest.approx([0.0] * 3 + [10.0] * 3 + [20.0] * 3 + [30.0] * 3)


def test_the_prefill_pool_gives_the_first_token_with_its_kv():
    cost = Flat(handoff=0.01)
    result = _run([SimRequest(0.0, 100, 4)], "prefill:tp1,decode:tp1", cost)
    assert result.first_s.tolist() == pytest.approx([2.0])  # a step, and 100 tokens of KV
    assert result.finished_s.tolist() == pytest.approx([5.0])


def test_fewest_requests_go_first():
    requests = [SimRequest(0.0, 10, 5 + i) for i in range(9)]
    result = _run(requests, "dp3", routing="least-requests")
    assert np.bincount(result.replica).tolist() == [3, 3, 3]


def test_goodput_counts_those_that_met_everything():
    result = _run([SimRequest(0.0, 100, 5), SimRequest(0.5, 100, 1)])
    assert result.goodput(Objective(ttft_ms=1200)) == pytest.approx(1 / result.span_s)
    assert result.summary(Objective(ttft_ms=1200))["attainment"] == pytest.approx(0.5)


def test_a_series_keeps_means_while_its_spans_grow():
    series = Series(max_points=8)
    for second in range(100):
        series.add(float(second), 1.0 if second % 2 == 0 else -1.0)
    means = series.means()
    assert len(means) <= 8 and series.span_s > 10 and series.peak == 1.0
    assert means[:-1].tolist() == pytest.approx([0.5] * (len(means) - 1), abs=0.1)


def test_a_bar_has_a_block_for_each_span():
    assert bar([0, 1, 2, 4], 4.0) == " ▂▄█"
    assert bar([], 1.0) == ""


def test_bad_input_gets_a_sentence():
    with pytest.raises(ValueError, match="'nearest' is unknown: choose one of least-work"):
        _run([SimRequest(0.0, 1, 1)], routing="nearest")
    with pytest.raises(ValueError, match="at least one request"):
        _run([])
    with pytest.raises(ValueError, match="no block for KV"):
        _run([SimRequest(0.0, 1, 1)], blocks=0)


def test_loads_by_name_by_lengths_and_from_a_trace(tmp_path):
    fixed = workload_requests("800/20", num_requests=5, rate=2.0)
    assert [(r.prompt_tokens, r.output_tokens) for r in fixed] == [(800, 20)] * 5
    assert fixed[-1].arrival_s == pytest.approx(2.5)
    assert {r.block_tokens for r in workload_requests("shared-prefix", num_requests=9)} == {512}
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1000, "output_length": 9, "hash_ids": [4, 5]}\n')
    assert trace_requests(path)[0].block_ids == (4, 5)


def _cli(*words):
    return CliRunner().invoke(app, list(words))


def test_the_command_prints_one_json_line():
    done = _cli("simulate", "--model", "llama-3.1-8b", "--gpus", "2xh100", "--layout", "dp2", "--workload", "chat",
                "--length-scale", "8", "--rate", "10", "--num-requests", "50", "--objective", "ttft=500,tpot=50",
                "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["source"] == "predicted" and told["layout"] == "dp2" and told["completed"] == 50
    assert 0 < told["ttft_ms"]["p50"] <= told["ttft_ms"]["p95"] <= told["ttft_ms"]["p99"]
    assert 0 < told["tpot_ms"]["mean"] < 100 and 0 < told["kv_peak"] < 1 and told["goodput"] > 0


def test_the_command_draws_the_queue_and_the_cache():
    done = _cli("simulate", "--model", "llama-3.1-8b", "--gpus", "1xh100", "--layout", "tp1", "--workload", "500/100",
                "--concurrency", "8", "--num-requests", "40")  # fmt: skip
    assert done.exit_code == 0 and "TTFT ms" in done.stdout and "KV " in done.stdout


def test_the_command_says_what_is_wrong():
    done = _cli("simulate", "--model", "llama-3.1-70b", "--gpus", "1xh100", "--layout", "tp1", "--workload", "chat")
    assert done.exit_code == 2 and "does not fit" in done.stderr
    done = _cli("simulate", "--model", "llama-3.1-8b", "--gpus", "1xh100", "--layout", "tp1")
    assert done.exit_code == 2 and "--workload" in done.stderr


def test_many_replicas_share_the_work_though_expectations_come_late():
    draw = np.random.default_rng(0)
    at = np.cumsum(draw.exponential(0.001, 2000))
    requests = [SimRequest(float(t), int(draw.integers(1, 300)), int(draw.integers(1, 200))) for t in at]
    result = _run(requests, "dp80", Affine(), 400, EngineSettings(max_num_seqs=16))
    assert result.done.all()
    work = np.bincount(result.replica, result.prompt_tokens + result.output_tokens, 80)
    assert work.std() < 0.25 * work.mean()
