"""Stored runs side by side: ours against another engine's, and what cannot be held against each other."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from labkit.cli import app
from labkit.lab.compare_stored import compare_stored
from labkit.lab.run import Run
from labkit.lab.running import begin, finish
from tests.test_lab import _recording, _where


def _stored(shift_ms: float = 0.0, engine: str = "", num: int = 40, **summary: object) -> Run:
    recording, where = _recording(num, shift_ms), _where()
    if engine:
        where.engine = {"name": engine, "version": "1", "metrics": {}}
        recording.steps = []
    begin(recording, "tp2", "lab-5m", "http://127.0.0.1:1")
    run = Run.load(finish(recording, where).run_id)
    run.summary |= summary
    return run


def test_ours_and_vllms_are_paired_request_by_request():
    found = compare_stored([_stored(), _stored(5, "vllm")])
    assert list(found.runs) == ["tp2", "vllm tp2"]
    told = {(entry["figure"], entry["percentile"]): entry for entry in found.differences}
    assert told["ttft_ms", 50]["interval_ms"] == pytest.approx([5, 5], abs=1e-4)
    assert told["ttft_ms", 50]["layout"] == "vllm tp2" and told["tpot_ms", 50]["verdict"] == "cannot tell"
    assert found.objective.ttft_ms == 100


def test_two_runs_of_one_name_are_told_apart():
    runs = [_stored(), _stored()]
    assert list(compare_stored(runs).runs) == [f"tp2 {run.run_id}" for run in runs]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"rate": 3.0}, "different loads (rate 3.0 and 10.0)"),
        ({"num": 39}, "number of requests 39 and 40"),
        ({"engine": "vllm", "seed": 1}, "seed 1 and 0"),
    ],
)
def test_runs_of_different_loads_are_refused(more: dict, sentence: str):
    with pytest.raises(ValueError) as refused:
        compare_stored([_stored(), _stored(**more)])
    assert sentence in str(refused.value)


def test_a_run_that_was_stopped_or_read_from_a_file_is_refused():
    stopped, read = _stored(), _stored(engine="vllm")
    stopped.status = "stopped"
    read.summary["engine"]["imported"] = {"file": "x.json"}
    for run, sentence in ((stopped, "is stopped"), (read, "tells no schedule")):
        with pytest.raises(ValueError, match=sentence):
            compare_stored([_stored(), run])


def test_the_shell_compares_stored_runs_and_wants_two():
    one, other = _stored(), _stored(5, "vllm")
    shown = CliRunner().invoke(app, ["compare-runs", one.run_id, "last"])
    assert shown.exit_code == 0 and "vllm tp2 against tp2: ttft p50 +5.0 ms (+5.0 to +5.0)" in shown.stdout
    assert "nan" not in shown.stdout, "what another engine does not tell is a dash"
    refused = CliRunner().invoke(app, ["compare-runs", other.run_id, other.run_id])
    assert refused.exit_code == 2 and "two or more different runs" in refused.stderr
