"""vLLM's own names, units and definitions, key by key; and the tables as files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from labkit.layout import Layout, read_layout
from labkit.measure.export import axis_names, export_run, to_vllm_json
from labkit.measure.metrics import Objective, Window, summarize
from labkit.measure.records import MemoryRecord
from labkit.measure.store import Store
from tests.measure.make import request, step

VLLM_KEYS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens"),
    *("total_output_tokens", "request_throughput", "request_goodput", "output_throughput"),
    *("total_token_throughput", "input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times"),
    *(
        "queue_times",
        "generated_texts",
        "errors",
        "max_output_tokens_per_s",
        "max_concurrent_requests",
        "rtfx",
    ),
    *(
        f"{stat}_{name}_ms"
        for name in ("ttft", "tpot", "itl", "e2el")
        for stat in ("mean", "median", "std", "p99")
    ),
}

AXES = {
    *("tp", "pp", "pcp_size", "dcp_size", "ep", "dp", "dp_attention", "disagg"),
    *("num_prefill_gpu", "num_decode_gpu"),
}


def _records() -> list:
    return [
        request(0, (60, 70, 90), (1, 1, 2), index=0, late_ms=10),
        request(1000, (1050, 1060), index=1),
        request(2000, (), index=2, status="failed", error="boom"),
        request(500, (550,), index=3, warmup=True),
    ]


def _run(records) -> dict:
    window = Window.of(records)
    return {
        "run_id": "r1",
        "layout": "dp2xtp2",
        "model": "lab-5m",
        "rate": 1.0,
        "started_at": "2026-03-04T05:06:07Z",
        "window_start_ns": window.start_ns,
        "window_end_ns": window.end_ns,
        "summary": summarize(records, Objective(ttft_ms=55)),
        "quality": [],
        "settings": {},
        "environment": None,
    }


def test_the_flat_object_has_every_key_and_its_own_definitions():
    records = _records()
    result = to_vllm_json(_run(records), records)
    assert set(result) == {*VLLM_KEYS, *AXES, "labkit"}
    assert result["date"] == "20260304-050607"
    assert (result["num_prompts"], result["completed"], result["failed"]) == (3, 2, 1)
    assert result["ttfts"] == pytest.approx([0.05, 0.05, 0.0])  # from the send, in seconds
    assert result["itls"][0] == pytest.approx([0.01, 0.01, 0.01]) and result["itls"][2] == []
    assert result["output_lens"] == [4, 2, 0] and result["input_lens"] == [10, 10, 10]
    assert result["errors"] == ["", "", "boom"]
    assert result["duration"] == pytest.approx(1.05)  # first send to last end, drain and all
    assert result["mean_ttft_ms"] == pytest.approx(50) and result["median_tpot_ms"] == pytest.approx(10)
    assert result["output_throughput"] == pytest.approx(6 / 1.05)
    assert result["request_goodput"] == pytest.approx(1 / 1.05)
    assert result["queue_times"][0] == pytest.approx(0.01)
    assert json.loads(json.dumps(result)) == result


def test_our_figures_stand_beside_it():
    records = _records()
    result = to_vllm_json(_run(records), records)
    assert result["labkit"]["summary"]["ttft_ms"]["mean"] == pytest.approx(55)  # from the scheduled arrival
    assert (result["tp"], result["dp"], result["labkit"]["layout"]) == (2, 2, "dp2xtp2")
    foreign = to_vllm_json(_run(records) | {"layout": None}, records)
    assert not AXES & set(foreign), "how a foreign server is split is not known, and not said"


def test_the_axis_names_of_others():
    assert axis_names(Layout(dp=2, tp=2))["dp_attention"] is False
    inside = axis_names(Layout.parse("dp2xtp2xep4"))
    assert (inside["tp"], inside["ep"], inside["dp_attention"]) == (4, 4, True)
    assert set(inside) == AXES
    assert (inside["num_prefill_gpu"], inside["num_decode_gpu"]) == (4, 4)


def test_an_empty_run_exports():
    result = to_vllm_json({"run_id": "x", "layout": "tp1"}, [])
    assert result["completed"] == 0 and result["mean_ttft_ms"] == 0.0


@pytest.fixture
def stored(tmp_path: Path):
    with Store(tmp_path / "store.sqlite") as store:
        records = _records()
        run = _run(records)
        store.start_run(**{name: value for name, value in run.items() if name != "environment"})
        store.add_requests("r1", records)
        one = step(0, 9, [5, 6], [1, 0], [2, 2])
        one.run_id = "r1"
        store.add_steps([one])
        store.add_memory("r1", [MemoryRecord(0, 1, 2, 3, 4, {"mlp": 1})])
        yield store


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_tables_as_files(stored: Store, tmp_path: Path, kind: str):
    import pandas as pd

    made = {path.name: path for path in export_run(stored, "r1", kind, tmp_path / "out")}
    assert set(made) == {
        "run.json",
        *(f"{name}.{kind}" for name in ("requests", "steps", "memory", "collectives")),
    }
    read = pd.read_parquet if kind == "parquet" else pd.read_csv
    assert len(read(made[f"requests.{kind}"])) == 4 and len(read(made[f"steps.{kind}"])) == 1
    assert json.loads(made["run.json"].read_text())["layout"] == "dp2xtp2"


def test_the_file_for_vllms_tools(stored: Store, tmp_path: Path):
    (path,) = export_run(stored, "r1", "vllm", tmp_path)
    assert path.name == "r1.json" and json.loads(path.read_text())["completed"] == 2


def test_unknown_formats_and_runs_get_a_sentence(stored: Store, tmp_path: Path):
    with pytest.raises(ValueError, match="vllm, trace, parquet, csv"):
        export_run(stored, "r1", "xml", tmp_path)
    with pytest.raises(KeyError, match="no run"):
        export_run(stored, "r9", "vllm", tmp_path)


def test_pools_with_roles_export_each_by_its_own_names():
    names = axis_names(read_layout("prefill:tp2xpp2,decode:dp2xtp2"))
    assert names["disagg"] and (names["prefill_tp"], names["prefill_pp"], names["decode_dp"]) == (2, 2, 2)
    assert (names["num_prefill_gpu"], names["num_decode_gpu"]) == (4, 4)
    assert not axis_names(read_layout("any:tp1,long:pcp2"))["disagg"]


def test_latencies_of_a_profiled_run_are_no_result_to_pass_on(stored: Store, tmp_path: Path):
    stored.finish_run("r1", "finished", summary={"profiled": {"ranks": [0]}})
    with pytest.raises(ValueError, match="was profiled"):
        export_run(stored, "r1", "vllm", tmp_path)
    assert export_run(stored, "r1", "trace", tmp_path)
