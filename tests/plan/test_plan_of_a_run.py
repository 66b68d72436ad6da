"""A stored run as the planner's beginning: its limit as it was measured, its load, its layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from labkit.cli import app
from labkit.lab.importing import import_results
from labkit.measure.store import Store
from labkit.plan.diagnose import diagnose
from labkit.plan.objective import PlanObjective
from labkit.plan.stored import PlannedFrom
from tests.plan.made_runs import TTFT, made_run

REAL = Path(__file__).parents[1] / "measure" / "files" / "vllm-0.32-open.json"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    return tmp_path


def stored(home: Path, run_id: str = "made", **made) -> str:
    run = made_run(**made)
    window = run.window
    with Store(home / "store.sqlite") as store:
        known = {"layout": "tp2", "model": "lab-5m", "workload": "chat", "rate": 10.0}
        store.start_run(run_id, started_at="2026-01-01T00:00:00Z", **known)
        store.add_requests(run_id, run.records)
        for step in run.step_records:
            step.run_id = run_id
        store.add_steps(run.step_records)
        store.finish_run(run_id, "finished", window_start_ns=window.start_ns, window_end_ns=window.end_ns,
                         summary=run.summary)  # fmt: skip
    return run_id


def test_a_stored_run_is_read_with_its_load_its_layout_and_its_steps(home):
    run_id = stored(home)
    run = PlannedFrom.load("last")
    assert run.run_id == run_id
    demand = run.demand()
    assert (demand.prompt_tokens, demand.output_tokens, demand.rate) == (10, 10, 10.0)
    assert run.layout() is not None and run.layout().slug == "tp2"
    assert run.settings().max_num_seqs == 64
    assert run.expert_load() == []
    told = diagnose(run.summary, PlanObjective(ttft_ms=50.0), run=run)
    assert (told.metric, told.resource) == ("ttft", "compute")


def test_labkit_plan_begins_from_a_run(home):
    run_id = stored(home, ttft={**TTFT, "queue": 900.0}, seqs=64)
    words = ["plan", "--run", run_id, "--model", "llama-3.1-8b", "--gpus", "4xrtx4090", "--ttft-p95-ms", "300",
             "--layout", "tp2", "--no-verify", "--json"]  # fmt: skip
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["diagnosis"]["resource"] == "queue"
    assert found["diagnosis"]["cause"] == "max_num_seqs"
    assert found["walk"][1]["code"] == "now"
    assert next(step for step in found["walk"] if step["code"] == "limit")["figures"]["how"] == "measured"
    seen = CliRunner().invoke(app, words[:-1])
    assert "What the run shows" in seen.stdout


def test_another_engine_s_run_is_planned_from_too(home):
    run = import_results(REAL)
    loaded = PlannedFrom.load(run.run_id)
    told = diagnose(loaded.summary, PlanObjective(ttft_ms=0.001), run=loaded)
    assert told.resource == "not measured" and told.measure
    assert loaded.demand().prompt_tokens > 0
    assert loaded.settings().policy == "vllm"


def test_a_run_without_a_summary_gets_a_sentence(home):
    with Store(home / "store.sqlite") as store:
        store.start_run("halfway", started_at="2026-01-01T00:00:00Z", layout="tp1", model="lab-5m")
    with pytest.raises(ValueError, match="no summary"):
        PlannedFrom.load("halfway")
