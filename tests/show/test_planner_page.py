"""The page Planner's kernel side: what a visitor sets becomes a case, bad input a sentence; the newest move wins."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from labkit.model.spec import model_dir
from labkit.plan.advise import advise
from labkit.plan.calibration import Calibration, LayoutFit, Measure, calibration_path, save_calibration
from labkit.show.planner_frame import Here
from labkit.show.planner_here import expect
from labkit.show.planner_inputs import Inputs, asked_of, case_of, demand_of, options
from labkit.show.planner_lab import PlannerLab
from labkit.show.planner_page import PlannerPage
from labkit.show.planner_source import PlannerSource, plan_of, question_of

SMALL = Inputs(n=1, model="llama-3.1-8b", num_gpus=2)


def wait_until(true: Callable[[], Any], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlannerSource]:
    monkeypatch.setattr(PlannerLab, "_connect", lambda *_: None)  # no lab server that happens to run here
    made = PlannerSource()
    yield made
    made.close()


def moved(inputs: Inputs, **change: Any) -> Inputs:
    return msgspec.structs.replace(inputs, n=inputs.n + 1, **change)


def test_what_is_set_is_what_is_planned_for() -> None:
    case = case_of(Inputs(device="a100", num_gpus=16, nodes=2, workload="chat", rate=7.0, kv_cache_dtype="fp8"))
    assert (case.hardware.num_gpus, case.hardware.num_nodes, case.hardware.device.name) == (16, 2, "a100")
    assert case.demand.rate == 7.0 and case.demand.name == "chat" and case.settings.kv_cache_dtype == "fp8"
    assert demand_of(Inputs(load="concurrency", concurrency=9)).concurrency == 9
    assert asked_of(Inputs(prompt_tokens=100, output_tokens=10)) == "100/10"


def test_everything_that_can_be_chosen_is_known_to_the_planner() -> None:
    offered = options()
    for device in offered["devices"]:  # type: ignore[attr-defined]
        assert case_of(Inputs(device=device)).hardware.num_gpus == 8
    for workload in offered["workloads"]:  # type: ignore[attr-defined]
        assert demand_of(Inputs(workload=workload)).prompt_tokens > 0
    assert set(offered["defaults"]) == set(Inputs.__struct_fields__)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"config": '{"model_type": "llama",'}, "is no JSON"),
        ({"config": "[1, 2]"}, "not an object"),
        ({"config": '{"model_type": "gpt9"}'}, "known families are"),
        ({"config": '{"model_type": "llama"}'}, "hidden_size"),
        ({"workload": "trace", "trace": "notes.txt"}, "is no trace"),
        ({"workload": "trace", "trace": "/nowhere/a.csv"}, "/nowhere/a.csv"),
        ({"num_gpus": 8, "nodes": 3}, "cannot stand on 3 nodes"),
        ({"device": "tpu9"}, "There is no GPU"),
    ],
)
def test_bad_input_is_a_sentence_and_nothing_is_lost(source: PlannerSource, change: dict[str, Any], sentence: str):
    before = source.card(SMALL)
    wanted = source._wanted
    with pytest.raises((ValueError, OSError), match=sentence):
        source.card(moved(SMALL, **change))
    assert source._wanted is wanted and source.card(SMALL) == before


def test_a_pasted_config_counts_instead_of_the_model(source: PlannerSource) -> None:
    text = (model_dir("llama-3.1-8b") / "config.json").read_text()
    pasted = source.card(moved(SMALL, model="llama-3.1-70b", config=text))
    assert pasted["candidate"]["predictions"] == source.card(SMALL)["candidate"]["predictions"]


def test_the_page_says_what_the_command_says() -> None:
    case = case_of(SMALL)
    told = advise(case.spec, case.hardware, case.demand, case.objective, case.settings, engine="vllm", price=case.price,
                  asked=asked_of(SMALL)).to_json()  # fmt: skip
    assert json.loads(json.dumps(plan_of(SMALL))) == json.loads(json.dumps(told))
    assert {"chosen", "walk", "checks", "layouts", "front", "commands"} <= set(told)


def test_the_answer_comes_when_the_visitor_is_still_and_is_the_newest(source: PlannerSource) -> None:
    source.open()
    for n in range(5):
        source.card(msgspec.structs.replace(SMALL, n=n, rate=1.0 + n))
    assert source.plan() == {} and source.frame().planning
    wait_until(source.plan)
    assert source.plan()["n"] == 4 and source.plan()["workload"]["rate"] == 5.0 and not source.frame().planning
    other = next(one["layout"] for one in source.plan()["layouts"] if one["fits"] and not one["chosen"])
    looked = source.card(msgspec.structs.replace(SMALL, n=5, rate=5.0, layout=other))
    assert looked["candidate"]["layout"] == other and looked["commands"]
    wait_until(lambda: source.plan()["n"] == 5, 5)
    assert source.frame().provenance == "predicted"


def test_a_visitor_who_looks_at_nothing_else_follows_the_answer(source: PlannerSource) -> None:
    """With its settings, and as the simulator has it: at once there is only the last question's answer."""
    assert source.following() is None, "nobody has asked yet"
    asked = Inputs(n=1, model="deepseek-v3", num_gpus=8, rate=4.0)
    source.card(asked)
    plan = plan_of(asked)
    source._plan, source._planned_for = plan | {"n": 1}, question_of(asked)
    card = source.following()
    assert card is not None and plan["chosen"]["settings"], "a case whose answer comes with a setting"
    (row,) = [one for one in plan["layouts"] if one["chosen"]]
    assert card["candidate"] == row and row["does"] and row["verified"]
    (name, value), *_ = plan["chosen"]["settings"].items()
    assert f"--{name.replace('_', '-')} {value}" in card["commands"][0]["commands"][0]["text"]
    source.card(moved(asked, layout="tp8"))
    assert source.following() is None, "another layout was chosen to look at"


def test_where_nothing_does_the_nearest_is_looked_at(source: PlannerSource) -> None:
    asked = Inputs(n=1, device="rtx4090", num_gpus=8, load="concurrency", concurrency=32)
    plan = plan_of(asked)
    source.card(asked)
    source._plan, source._planned_for = plan, question_of(asked)
    card = source.following()
    assert plan["chosen"] is None and card is not None
    assert card["candidate"]["layout"] == plan["infeasible"]["nearest_layout"] != "tp8"


def test_no_commands_for_what_does_not_fit(source: PlannerSource) -> None:
    card = source.card(Inputs(n=1, model="deepseek-v3", num_gpus=8, layout="tp4"))
    assert not card["candidate"]["fits"] and card["commands"] == []


def test_which_layout_is_looked_at_changes_no_plan() -> None:
    assert question_of(SMALL) == question_of(moved(SMALL, layout="tp2"))
    assert question_of(SMALL) != question_of(moved(SMALL, rate=9.0))


def test_a_trial_is_refused_without_a_server_or_for_what_it_cannot_run(source: PlannerSource) -> None:
    with pytest.raises(RuntimeError, match="labkit serve"):
        source.trial("tp1")
    source._lab._session, source._lab._here = object(), Here("lab-5m", 2, ["tp1", "tp2"])  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="cannot run tp4"):
        source.trial("tp4")
    source._lab._session = None




def test_a_trial_is_expected_to_do_what_the_calibration_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    assert expect("lab-5m", "tp1", "chat", 2.0) is None, "not calibrated"
    fit = LayoutFit(
        "tp1", (({"step": Measure(0.020, "s")}, {}),), client={}, crossing={}, pipeline={},
        num_steps=100, num_dropped=0, error=0.07, bias=0.0, axis="tp", num_collectives=0,
    )  # fmt: skip
    save_calibration(Calibration({"model": "lab-5m"}, {"tp1": fit}), calibration_path("lab-5m"))
    found = expect("lab-5m", "tp1", "chat", 2.0)
    assert found is not None
    low, middle, high = found.figures["tpot_p50"]
    assert middle == pytest.approx(20.0, rel=0.02), "every step takes 20 ms"
    assert (low, high) == (pytest.approx(0.93 * 20, rel=0.02), pytest.approx(1.07 * 20, rel=0.02)), "steps of 7 %"
    assert 20 <= found.figures["ttft_p50"][1] <= 60 and found.figures["ttft_p95"][1] >= found.figures["ttft_p50"][1]
    assert expect("lab-5m", "tp2", "chat", 2.0) is None, "that layout was not measured"


def test_wishes_reach_the_source_and_its_refusals_the_visitor(source: PlannerSource) -> None:
    page = PlannerPage(source, rate_hz=50)
    try:
        page._receive(page, {"type": "want", **msgspec.to_builtins(SMALL)}, [])
        wait_until(lambda: page.card)
        assert page.card["n"] == 1 and page.card["candidate"]["layout"]
        page._receive(page, {"type": "want", **msgspec.to_builtins(moved(SMALL, config="{"))}, [])
        wait_until(lambda: page._notice)
        assert "is no JSON" in page._notice and page.card["n"] == 1
        page._receive(page, {"type": "trial", "layout": "tp1"}, [])
        wait_until(lambda: "labkit serve" in page._notice)
    finally:
        page.close()


def test_no_torch_comes_with_the_page() -> None:
    code = (
        "import sys; from labkit.show.planner_page import planner_page; from labkit.show.planner_inputs import Inputs; "
        "page = planner_page(); page._source.card(Inputs(num_gpus=2)); "
        "print([m for m in ('torch', 'pandas', 'plotly') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_answers_settings_come_with_it(source: PlannerSource) -> None:
    case = case_of(SMALL)
    found = plan_of(SMALL)
    found["chosen"] = {"layout": "tp1", "settings": {"max_num_seqs": 7}}
    source._plan = found
    assert source.card(SMALL)["commands"][0]["commands"][0]["text"].count("--max-num-seqs 7") == 1
    assert replace(case.settings, max_num_seqs=7) != case.settings
