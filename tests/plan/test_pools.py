"""Prefill apart from decode: what is predicted of two pools, and when they are what is advised."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labkit.layout import Deployment, Layout
from labkit.model.spec import load_spec
from labkit.plan.advise import advise
from labkit.plan.candidates import evaluate
from labkit.plan.case import Case
from labkit.plan.demand import read_demand
from labkit.plan.hardware import load_hardware
from labkit.plan.objective import PlanObjective
from labkit.plan.pools import pool_candidate, pool_checks, predict_pools

ONE_AND_TWO = Deployment.of(("prefill", Layout(dp=2)), ("decode", Layout(tp=2)))


def case(rate: float = 3.0, prompt: int = 16384, gpus: str = "4xh100", nodes: int = 1, tpot: float = 10.0) -> Case:
    return Case(load_spec("llama-3.1-8b"), load_hardware(gpus, nodes), read_demand(f"{prompt}/256", rate=rate),
                PlanObjective(ttft_ms=5000, tpot_ms=tpot))  # fmt: skip


def test_prompts_do_not_slow_the_answers_of_another_pool():
    apart, together = pool_candidate(case(), ONE_AND_TWO), evaluate(case(), Layout(dp=2, tp=2))
    assert apart.prediction is not None and together.prediction is not None
    assert apart.prediction.tpot_ms["p95"] < together.prediction.tpot_ms["p95"]
    longer = pool_candidate(case(prompt=20_000), ONE_AND_TWO)
    assert longer.prediction is not None
    more = longer.prediction.tpot_ms["mean"] / apart.prediction.tpot_ms["mean"]
    assert 1 <= more < 1.2  # keys to read, no prompts to wait for


def test_the_handoff_is_part_of_the_first_token_s_time():
    here, there = case(), case(gpus="4xh100", nodes=2)
    plan = pool_candidate(here, ONE_AND_TWO).memory
    assert plan is not None
    prefill, decode = (pool.layout for pool in ONE_AND_TWO.pools)
    near, far = (predict_pools(one, prefill, decode, plan)[1] for one in (here, there))
    assert far.handoff_s > near.handoff_s > 0


def test_pools_are_advised_where_phases_interfere_and_nothing_else_does():
    one = case()
    found = advise(one.spec, one.hardware, one.demand, one.objective, verify=False)
    assert found.chosen is not None and isinstance(found.chosen.layout, Deployment)
    answers = {question.code: question.answer for question in found.walk}
    assert answers["pd"] == "yes"
    checks = {check.name: check.status for check in found.checks if check.axis == "pd"}
    assert checks["transfer"] == "passed"
    assert checks["handoff measured"] == "not yet measured"
    texts = [command["role"] for entry in found.commands for command in entry["commands"]]
    assert {"prefill", "decode", "router"} <= set(texts)
    assert found.to_json()["placement"]["ranks"][0]["pool"] == "prefill"


def test_without_a_tight_tpot_there_is_no_reason_for_pools():
    one = case(tpot=100.0)
    found = advise(one.spec, one.hardware, one.demand, one.objective, verify=False)
    assert found.chosen is not None and isinstance(found.chosen.layout, Layout)


def test_a_link_that_cannot_carry_the_kv_fails_the_check():
    one = case(gpus="4xh100", nodes=2)
    slow = replace(one.hardware.across, message_bandwidth=replace(one.hardware.across.message_bandwidth, value=1e9))
    starved = replace(one, hardware=replace(one.hardware, across=slow))
    candidate = pool_candidate(starved, ONE_AND_TWO)
    transfer = next(check for check in pool_checks(starved, candidate) if check.name == "transfer")
    assert transfer.status == "failed"
    assert candidate.fault == "overload"


def test_a_closed_loop_is_the_rate_at_which_as_many_are_in_flight():
    closed = replace(case(), demand=read_demand("16384/256", concurrency=8))
    found = pool_candidate(closed, ONE_AND_TWO)
    assert found.prediction is not None
    assert found.prediction.concurrency == pytest.approx(8, rel=0.05)
