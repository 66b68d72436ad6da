"""Lessons 07 and 08 without ranks: where the five situations end, and what is drawn and said of what was planned."""

from __future__ import annotations

import pytest

from labkit.plan.demand import read_demand
from labkit.plan.objective import PlanObjective
from labkit.show import figures_plan
from labkit.teach import lesson07, lesson08, planned
from labkit.teach.reference import ReferenceCase

ENDS = {"queue": "dp2xtp2", "long-inputs": "pcp2xtp2", "one-answer": "tp4", "kv": "tp8xdcp8", "pairs": "pp2xtp2"}


@pytest.mark.parametrize("code", ENDS)
def test_a_situation_ends_where_the_lesson_says(code: str):
    assert planned.ends_in(lesson07.plan(code)) == ENDS[code]


def test_the_case_is_the_same_at_both_scales():
    verdicts = [row[-1] for row in lesson07.case_table(ReferenceCase()).rows]
    assert verdicts[0] == verdicts[3] == "does not fit"
    assert all("KV holds" in told for told in (*verdicts[1:3], *verdicts[4:]))


def test_a_prediction_is_dotted_and_its_marks_are_open():
    advice = lesson07.plan("queue")
    found = planned.simulate_layouts(advice, "tp2", planned.ends_in(advice))
    figure = figures_plan.simulated_figure(found, advice.case.objective, "t", planned.badge_of(advice))
    assert {trace.line.dash for trace in figure.data} == {"dot"}
    assert all(trace.marker.symbol.endswith("-open") for trace in figure.data)
    both = figures_plan.ratios_figure({"a": (3.0, 0.5)}, {"a": (2.0, 0.4)}, "t", "a model", "a machine")
    lines = {trace.line.color: trace.line.dash for trace in both.data if trace.mode == "lines"}
    assert sorted(lines.values()) == ["dot", "solid"]
    before, after = lesson07.simulated_ratios({"queue": advice}, {"queue": found})["queue"]
    assert before > 1 > after


def test_traffic_is_brought_to_size_in_lengths_and_load():
    seen = read_demand("chat", concurrency=4)
    real = lesson08.at_scale(seen, lengths=10, load=8)
    assert real.concurrency == 32 and real.prompt_tokens == 10 * seen.prompt_tokens
    assert real.lengths[0] == tuple(10 * size for size in seen.lengths[0])


def test_ones_own_config_becomes_bytes_and_a_plan(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    spec, hardware = lesson08.own_model(None), lesson08.own_gpus(None)
    assert lesson08.kv_bytes(spec) == 48 * 2 * 4 * 128 * 2
    assert lesson08.fewest_gpus(spec, hardware, 32, 1500) == 2
    demand = read_demand("1024/256", concurrency=16)
    advice = lesson08.plan_own(spec, hardware, demand, PlanObjective(ttft_ms=5000, tpot_ms=200))
    assert "vllm serve" in repr(lesson08.Commands(advice, "vllm"))
