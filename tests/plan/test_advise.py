"""The smallest layout that does it, why not the others, and what is said when none does."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest

from labkit.layout import Layout
from labkit.layout.choices import candidate_layouts
from labkit.model.spec import load_spec
from labkit.plan.advise import Advice, advise
from labkit.plan.candidates import within
from labkit.plan.demand import read_demand
from labkit.plan.diagnose import Diagnosis
from labkit.plan.hardware import load_hardware
from labkit.plan.objective import Outcome, PlanObjective
from labkit.plan.work import EngineSettings

FAST = PlanObjective(ttft_ms=2000, tpot_ms=100)


@cache
def planned(
    model: str = "llama-3.1-70b", gpus: str = "4xh200", workload: str = "1024/256", objective: PlanObjective = FAST,
    rate: float | None = None, concurrency: int | None = None, now: str = "", nodes: int = 1,
    settings: EngineSettings | None = None, diagnosis: Diagnosis | None = None, price: float | None = None,
    load: tuple[float, ...] = (), engine: str = "vllm",
) -> Advice:  # fmt: skip
    return advise(
        load_spec(model), load_hardware(gpus, nodes), read_demand(workload, rate=rate, concurrency=concurrency),
        objective, settings, current=Layout.parse(now) if now else None, diagnosis=diagnosis, price=price,
        expert_load=load, engine=engine, verify=False,
    )  # fmt: skip


CASES = (
    {"rate": 1.0},
    {"rate": 8.0, "now": "tp2"},
    {"model": "llama-3.1-8b", "gpus": "4xrtx4090", "workload": "512/128", "rate": 6.0},
    {"model": "qwen3-235b-a22b-fp8", "gpus": "8xh100", "workload": "2048/512", "concurrency": 64},
    {"model": "deepseek-v3", "gpus": "8xh200", "workload": "8192/512", "concurrency": 32,
     "objective": PlanObjective(ttft_ms=20_000, tpot_ms=200)},
    {"model": "llama-3.1-70b", "gpus": "8xh100", "nodes": 2, "rate": 2.0},
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values()))[:40])
def test_no_axis_without_a_job_and_a_reason_for_every_other_layout(case: dict):
    found = planned(**case)
    rows = found.to_json()["layouts"]
    assert {row["layout"] for row in rows} >= {
        layout.slug for layout in candidate_layouts(found.case.hardware.num_gpus)
    }
    assert all(row["reason"] for row in rows if not row["chosen"])
    chosen = found.chosen
    assert chosen is not None and isinstance(chosen.layout, Layout)
    doing = [one for one in found.layouts if one.does and isinstance(one.layout, Layout)]
    if found.kind != "as it is":
        assert not [one.layout.slug for one in doing if within(one.grid, chosen.layout)]
    assert set(found.jobs) == {axis for axis in ("tp", "pp", "dp", "pcp", "dcp", "ep")
                               if getattr(chosen.layout, axis) > 1}  # fmt: skip


def test_prompts_are_shared_out_for_prompts_and_not_to_hold_experts():
    found = planned(model="qwen3-30b-a3b", gpus="4xl40s", rate=4.0, objective=PlanObjective(ttft_ms=3000, tpot_ms=60))
    assert found.chosen is not None
    assert found.chosen.grid.pcp == 1


def test_over_two_nodes_stages_cross_the_network_and_shards_do_not():
    found = planned(model="llama-3.1-405b", gpus="16xh100", nodes=2, rate=1.0, objective=PlanObjective(tpot_ms=150))
    assert found.chosen is not None and found.chosen.layout == Layout(pp=2, tp=8)
    assert found.places is not None
    assert {place.axis: place.link for place in found.places.axes} == {"tp": "nvlink", "pp": "network"}


def test_the_same_words_give_the_same_plan():
    first, second = (json.dumps(planned.__wrapped__(rate=3.0).to_json(), sort_keys=True) for _ in range(2))
    assert first == second


def test_names_that_scripts_rely_on():
    found = json.loads(json.dumps(planned(rate=1.0, price=2.5).to_json(), allow_nan=False))
    assert {"chosen", "walk", "checks", "layouts", "commands", "front", "diagnosis", "placement", "next"} <= set(found)
    row = next(row for row in found["layouts"] if row["chosen"])
    assert {"fits", "queues", "reason", "predictions"} <= set(row)
    assert {"ttft_ms", "tpot_ms", "band_ttft", "band_tpot"} <= set(row["predictions"])
    assert found["chosen"]["layout"] == row["layout"]
    assert row["cost_per_million"] == pytest.approx(2.5 / (row["tokens_per_gpu"] * 3600) * 1e6)
    assert {check["status"] for check in found["checks"]} <= {"passed", "failed", "not yet measured"}
    assert any("vllm serve" in command["text"] for entry in found["commands"] for command in entry["commands"])


def test_one_answer_and_the_server_are_different_wishes():
    one = planned(objective=PlanObjective(answer_tokens_per_s=60), concurrency=1, now="tp2")
    all_of_them = planned(objective=PlanObjective(server_tokens_per_s=2000), rate=8.0, now="tp2")
    assert one.chosen is not None and one.chosen.layout == Layout(tp=4)
    assert all_of_them.chosen is not None and all_of_them.chosen.layout == Layout(dp=2, tp=2)


def test_a_setting_of_the_engine_comes_before_any_axis():
    few = EngineSettings(max_num_seqs=8)
    found = planned(rate=3.0, settings=few, now="tp2", objective=PlanObjective(ttft_ms=2000, tpot_ms=200))
    assert found.kind == "settings"
    assert found.to_json()["chosen"]["settings"].keys() == {"max_num_seqs"}
    settings = next(question for question in found.walk if question.code == "settings")
    assert settings.answer == "yes"
    assert {question.answer for question in found.walk if question.code in ("pp", "dp", "dcp")} == {"not asked"}


def test_what_the_application_could_do_is_told_with_its_figure():
    found = planned(workload="32768/64", rate=0.1, now="tp2", objective=PlanObjective(ttft_ms=5000, tpot_ms=100))
    settings = next(question for question in found.walk if question.code == "settings")
    others = {remedy["code"]: remedy for remedy in settings.figures["others"]}
    assert 0 < others["shorter input"]["figures"]["prompt_tokens"] < 32768
    assert 0 < others["shared input"]["figures"]["shared"] < 1


def test_a_wish_that_no_layout_meets_is_named_with_the_nearest():
    found = planned(rate=1.0, objective=PlanObjective(ttft_ms=1.0, tpot_ms=1000))
    assert found.chosen is None and found.infeasible is not None
    assert found.infeasible.metric == "ttft"
    assert found.infeasible.best is not None and found.infeasible.best.value > 1.0
    others = [one.figure("ttft", "p95") for one in found.layouts]
    assert found.infeasible.best.value == min(others)
    assert found.to_json()["chosen"] is None


def test_traffic_that_no_layout_keeps_up_with_is_said_with_the_most_that_one_does():
    found = planned(rate=60.0, gpus="2xh200")
    assert found.chosen is None and found.infeasible is not None
    assert found.infeasible.metric == "rate"
    assert "requests/s" in found.infeasible.sentence


def test_a_model_that_fits_nowhere_is_said_to():
    found = planned(model="llama-3.1-405b", gpus="2xrtx4090", rate=1.0)
    assert found.chosen is None and found.infeasible is not None
    assert found.infeasible.metric == "memory"
    assert "does not fit" in found.infeasible.sentence


def test_the_front_has_nobody_that_another_beats_in_all_three():
    found = planned(rate=4.0)
    rows = [(one.figure("ttft", "p95"), one.figure("tpot", "p95"), -one.tokens_per_gpu) for one in found.front]
    assert len(rows) > 1
    for row in rows:
        assert not [other for other in rows if other != row and all(a <= b for a, b in zip(other, row, strict=True))]
    everyone = [one for one in found.layouts if one.prediction]
    for one in everyone:
        point = (one.figure("ttft", "p95"), one.figure("tpot", "p95"), -one.tokens_per_gpu)
        assert any(all(a <= b for a, b in zip(row, point, strict=True)) for row in rows)


def test_a_measured_limit_decides_against_the_prediction():
    missed = Outcome("ttft", "TTFT p95", 9000.0, 2000.0)
    measured = Diagnosis("ttft", "queue", "ranks busy", "high", "TTFT p95 9,000 ms misses 2,000 ms.", (missed,))
    alone = planned(rate=1.0, now="tp2")
    assert alone.chosen is not None and alone.kind == "as it is"
    found = planned(rate=1.0, now="tp2", diagnosis=measured)
    assert found.chosen is not None and found.chosen.layout != Layout(tp=2)
    assert found.limit.resource == "queue"
    row = next(row for row in found.to_json()["layouts"] if row["layout"] == "tp2")
    assert "measured" in row["reason"]


def test_checks_of_experts_wait_for_a_measured_load():
    common = {"model": "qwen3-235b-a22b-fp8", "gpus": "8xh100", "workload": "2048/512", "concurrency": 64}
    found = planned(**common)
    layout = next(one for one in found.layouts if one.layout == Layout(tp=4, ep=4))
    assert layout.fits
    from labkit.plan.checks import all_checks
    from labkit.plan.rank_places import place_ranks

    places = place_ranks(layout.layout, found.case.spec, found.case.hardware, 2048, 2560)
    before = {check.name: check for check in all_checks(found.case, layout, places) if check.axis == "ep"}
    assert before["imbalance"].status == "not yet measured" and before["imbalance"].measure
    even, skewed = [1.0] * 128, [100.0] * 4 + [1.0] * 124
    slower = [next(check for check in all_checks(found.case, layout, places, load) if check.name == "imbalance")
              for load in (even, skewed)]  # fmt: skip
    assert slower[0].figures["imbalance"] == pytest.approx(1.0)
    assert slower[1].figures["imbalance"] > 2
    assert slower[1].figures["slower"] > slower[0].figures["slower"] == pytest.approx(1.0)


def test_nothing_asked_is_refused():
    with pytest.raises(ValueError, match="Nothing is asked"):
        planned.__wrapped__(rate=1.0, objective=PlanObjective())


def test_lengths_beyond_what_a_replica_holds_do_not_fit():
    found = planned(workload="120000/1000", concurrency=1, now="", objective=PlanObjective(ttft_ms=1e6))
    small = [one for one in found.layouts if one.fault == "memory"]
    assert small
    assert replace(found.case.demand, concurrency=2).longest_tokens == 121_000


def test_a_layout_that_fails_a_check_of_its_axis_is_not_chosen_while_another_does(monkeypatch):
    from labkit.plan.checks import Check

    made = Check("dp", "admission", "failed", "made to fail.")
    monkeypatch.setattr("labkit.plan.settle.all_checks", lambda case, one, places: [made])
    found = advise(load_spec("llama-3.1-70b"), load_hardware("4xh200"), read_demand("1024/256", rate=7.0), FAST,
                   current=Layout(tp=2))  # fmt: skip
    refused = next(one for one in found.layouts if one.layout == Layout(dp=2, tp=2))
    assert refused.fault == "check" and "dp's check of admission" in refused.reason
    assert found.chosen is not None and found.chosen.grid.dp == 1


def test_a_choice_does_not_rest_on_groups_that_were_never_measured():
    from labkit.plan.choose import like_those_measured

    assert like_those_measured(Layout(dp=3, pp=3, tp=4))
    assert not like_those_measured(Layout(pcp=3))
    found = planned(model="qwen3-32b", gpus="8xh200", workload="4096/256", rate=4.0,
                    objective=PlanObjective(ttft_ms=1000, tpot_ms=40))  # fmt: skip
    assert found.chosen is not None and like_those_measured(found.chosen.grid)


def test_what_the_simulator_has_looked_at_is_still_what_was_found():
    """A setting that does it, and a base that does, are told as such after the simulation too."""
    spec, hardware = load_spec("deepseek-v3"), load_hardware("8xh200")
    asked = PlanObjective(ttft_ms=1000, tpot_ms=50)
    by_setting = advise(spec, hardware, read_demand("2048/256", rate=4.0), asked, verify=True)
    assert by_setting.kind == "settings" and by_setting.chosen is not None and by_setting.chosen.verified
    answers = {question.code: question.answer for question in by_setting.walk}
    assert answers["settings"] == "yes" and answers["dp"] == answers["pd"] == "not asked"

    easy = advise(load_spec("llama-3.1-8b"), load_hardware("2xh200"), read_demand("2048/256", rate=4.0), asked)
    assert easy.kind == "as it is" and easy.chosen is not None and easy.chosen.verified
    assert {question.answer for question in easy.walk if question.code in ("settings", "tp", "dp")} == {"not asked"}
