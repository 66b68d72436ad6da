"""A stored run beside the current figures: whoever measured it, what it lacks is named, and never made up."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from labkit.lab.importing import import_results
from labkit.lab.run import open_store
from labkit.lab.stored import origin_of, short_name, stored_runs
from labkit.measure.metrics import Objective
from labkit.show.beside import Pinned, conditions
from labkit.show.frame import LayoutsFrame, to_message

VLLM = {
    "date": "20260131-093000", "backend": "openai", "model_id": "/models/lab-30m", "request_rate": 4.0, "tp": 2,
    "input_lens": [64] * 30, "output_lens": [11] * 30, "start_times": [100.0 + i / 4 for i in range(30)],
    "ttfts": [0.1 + i / 1000 for i in range(30)], "itls": [[0.02] * 10] * 30, "errors": [""] * 30,
}  # fmt: skip
AIPERF = [
    {
        "metadata": {"x_request_id": f"a{i}", "request_start_ns": 10**9 * (1 + i), "benchmark_phase": "profiling"},
        "metrics": {
            "input_sequence_length": {"value": 32, "unit": "tokens"},
            "output_sequence_length": {"value": 4, "unit": "tokens"},
            "time_to_first_token": {"value": 40.0, "unit": "ms"},
            "request_latency": {"value": 100.0, "unit": "ms"},
        },
    }
    for i in range(3)
]
SNAPSHOT = {
    "state": {"model": "lab-30m", "layout": "tp2", "dtype": "float32",
              "environment": {"host": "here", "backend": "cpu", "device": "cpu", "num_cores": 2}},
    "run": {"workload": "chat", "rate": 4.1, "layout": "tp2"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))


def imported(tmp_path: Path) -> str:
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps(VLLM))
    return import_results(path).run_id


def test_files_of_both_clients_stand_in_the_list(tmp_path: Path):
    imported(tmp_path)
    lines = tmp_path / "profile_export.jsonl"
    lines.write_text("\n".join(map(json.dumps, AIPERF)))
    import_results(lines)
    with open_store() as store:
        store.start_run("under-way", started_at="2026-01-01", layout="tp1", model="lab-5m", workload="chat")
        found = {line.name: line for line in stored_runs(store)}
    assert set(found) == {"TP2, vLLM's bench serve", "aiperf"}, "what has no figures cannot be pinned"
    vllm = found["TP2, vLLM's bench serve"]
    assert (vllm.layout, vllm.rate, vllm.n, vllm.started_at) == ("tp2", 4.0, 30, "2026-01-31T09:30:00")
    assert found["aiperf"].layout == "" and found["aiperf"].rate is None


def test_a_file_of_vllm_beside_the_current_load(tmp_path: Path):
    pinned = Pinned.stored(imported(tmp_path))
    now = {"ttft_ms": np.linspace(200, 230, 40), "tpot_ms": np.linspace(19.9, 20.1, 40)}
    beside = pinned.beside(SNAPSHOT, now, Objective(ttft_ms=1000))
    assert beside.run is not None and beside.at == "2026-01-31 09:30"
    assert beside.run.ttft_ms.p50 == pytest.approx(114.5) and beside.run.tpot_ms.p50 == pytest.approx(20)
    assert beside.missing == ["parts", "memory", "steps"] and beside.memory == [] and beside.why is None
    assert set(beside.run.ttft_parts_ms.values()) == {None}, "nothing is made up"
    assert beside.recorder == "vLLM's bench serve" and "TTFT counts from the send" in beside.remarks[0]
    json.dumps(to_message(LayoutsFrame(beside=beside)))

    same = {row.name: (row.there, row.same) for row in beside.conditions}
    assert same["model"] == ("lab-30m", True), "a path to the checkpoint is not another checkpoint"
    assert same["rate"] == ("4/s", True) and same["layout"] == ("tp2", True)
    assert same["engine"] == same["machine"] == same["workload"] == ("", None), "not told, so not compared"

    ttft = {row.percentile: row for row in beside.differences if row.figure == "ttft_ms"}
    assert ttft[50].verdict == "more" and ttft[50].low_ms < 100.5 < ttft[50].high_ms
    assert ttft[50].then_ms == pytest.approx(114.5) and ttft[95].few
    tpot = next(row for row in beside.differences if row.figure == "tpot_ms")
    assert tpot.verdict == "cannot tell"


def test_goodput_follows_the_objective_of_the_page(tmp_path: Path):
    pinned = Pinned.stored(imported(tmp_path))
    shares = [pinned.beside(None, None, Objective(ttft_ms=ms)).run.goodput.attainment for ms in (1000, 114.6, 1)]
    assert shares == [1.0, 0.5, 0.0]


def test_another_rate_and_another_workload_are_named():
    summary = {"layout": "tp2", "model": "lab-30m", "workload": "mixed", "rate": 8.0, "engine": None,
               "environment": {"host": "there", "device": "cpu", "num_cores": 2, "dtype": "float32"}}  # fmt: skip
    differing = [row.name for row in conditions(summary, SNAPSHOT) if row.same is False]
    assert differing == ["workload", "rate", "machine"]
    assert conditions({**summary, "concurrency": 8}, SNAPSHOT)[3].there == "8 in flight"


def test_a_cpu_is_the_same_under_whatever_name_an_engine_gives_it():
    theirs = {"host": "here", "backend": "cpu", "device": "x86_64", "num_cores": 2}
    found = {row.name: row.same for row in conditions({"environment": theirs, "engine": None}, SNAPSHOT)}
    assert found["machine"] is True
    gpu = {name: row.same for row in conditions({"environment": {**theirs, "backend": "cuda", "device": "H200"},
                                                 "engine": None}, SNAPSHOT) for name in [row.name]}  # fmt: skip
    assert gpu["machine"] is False


def test_whose_server_it_was():
    engine = {"name": "vllm", "version": "0.12.0"}
    assert short_name({"layout": "tp2", "engine": engine}) == "TP2 on vLLM"
    assert origin_of({"layout": "tp2", "engine": engine}).engine == "vLLM 0.12.0"
    assert origin_of({"layout": "tp2", "engine": None}).engine == "labkit"
    assert origin_of({"layout": None, "engine": None}).engine == "", "a foreign server did not say"


def test_a_run_without_figures_is_refused_in_a_sentence():
    with open_store() as store:
        store.start_run("broken", started_at="2026-01-01", layout="tp1", model="lab-5m", workload="chat")
    with pytest.raises(ValueError, match="no figures"):
        Pinned.stored("broken")
    with pytest.raises(KeyError, match="no run 'gone'"):
        Pinned.stored("gone")


def test_a_layout_pinned_while_it_ran_has_differences_and_nothing_else():
    beside = Pinned({"ttft_ms": np.full(20, 10.0)}).beside(SNAPSHOT, {"ttft_ms": np.full(20, 30.0)}, Objective())
    assert beside.run is None and beside.conditions == []
    assert [(row.percentile, row.difference_ms) for row in beside.differences] == [(50, 20.0), (90, 20.0), (95, 20.0)]
