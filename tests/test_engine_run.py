"""`labkit run --engine`: a run on a stand-in from start to end, on one that breaks, and on a real vLLM where one is."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from labkit.cli import app
from labkit.cluster.engine_plan import EngineError, find_engine
from labkit.cluster.engine_shm import SHM
from labkit.cluster.engines import remove_left
from labkit.lab.engine_run import run_engine
from labkit.lab.run import Run
from labkit.layout import read_layout
from labkit.paths import data_dir, home_dir, repo_dir
from labkit.plan.deploy import deploy_flags

pytestmark = pytest.mark.engine

STAND_IN = Path(__file__).parent / "cluster" / "stand_in_engine.py"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`vllm` on PATH is a stand-in, and a folder looks like a checkpoint to us; the stand-in does not read it."""
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STAND_IN}" "$@"\n')
    program.chmod(0o755)
    monkeypatch.delenv("LABKIT_VLLM_PYTHON", raising=False)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    folder = tmp_path / "a-model"
    folder.mkdir()
    shutil.copy(data_dir() / "models" / "lab-5m" / "config.json", folder)
    (folder / "model.safetensors").touch()
    return folder


def test_a_run_on_a_stand_in_says_engine_version_flags_and_metrics(stand_in: Path):
    lines: list[str] = []
    run = run_engine(
        "vllm", "tp2", num_requests=6, concurrency=2, model=str(stand_in), engine_args="--seed 7",
        length_scale=0.1, on_line=lambda _, line: lines.append(line),
    )  # fmt: skip
    assert run.status == "finished" and run.summary["requests"]["completed"] == 6
    told = run.summary["engine"]
    assert (told["name"], told["version"], told["flags"]) == ("vllm", "stand-in", ["--tensor-parallel-size", "2"])
    assert told["command"][-2:] == ["--seed", "7"]
    assert told["metrics"]["waiting"] == {"mean": 2.0, "max": 2.0} and told["metrics"]["preemptions"] == 7.0, (
        "six requests and the one that tries the server"
    )
    assert "Loading weights took 0.01 seconds" in lines and Path(told["log"]).is_file()
    assert (run.summary["layout"], run.summary["num_ranks"], run.summary["model"]) == ("tp2", 2, "a-model")
    stored = Run.load(run.run_id)
    assert stored.summary["engine"] == told and stored.environment["versions"] == {"vllm": "stand-in"}
    with pytest.raises(OSError):
        import urllib.request

        urllib.request.urlopen(f"http://127.0.0.1:{told['command'][told['command'].index('--port') + 1]}/health")


def test_a_stand_in_that_dies_under_load_leaves_a_failed_run_with_its_last_words(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("STAND_IN_ENDS_AFTER", "4")
    run = run_engine("vllm", "tp1", num_requests=400, concurrency=1, model=str(stand_in), length_scale=0.1)
    assert run.status == "failed"
    assert "The vllm server ended with exit code 9." in run.summary["error"]
    assert run.summary["error"].endswith("stand-in: enough")
    assert run.summary["engine"]["metrics"]["num_samples"] >= 1


def _hear_ctrl_c() -> None:
    """A test run in the background ignores it, and its children would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("when", ["starting", "running"])
def test_ctrl_c_ends_a_stand_in_whenever_it_comes(when: str, stand_in: Path, tmp_path: Path):
    note, busy = tmp_path / "child", tmp_path / "busy"
    words = ["run", "--engine", "vllm", "--model", str(stand_in), "--rate", "5", "--seconds", "60", "--warmup", "0"]
    shell = subprocess.Popen(
        [sys.executable, "-m", "labkit.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "STAND_IN_CHILD": str(note), "STAND_IN_BUSY": str(busy), "PYTHONPATH": str(repo_dir())},
        preexec_fn=_hear_ctrl_c,
    )  # fmt: skip
    _wait_for(lambda: note.exists() and note.read_text())
    if when == "running":
        _wait_for(busy.exists)
    shell.send_signal(signal.SIGINT)
    out, err = shell.communicate(timeout=30)
    assert shell.returncode == 130, err
    assert not psutil.pid_exists(int(note.read_text()))
    if when == "running":
        summary = json.loads(out.splitlines()[-1])
        assert summary["requests"]["completed"] >= 4 and summary["engine"]["name"] == "vllm"
    else:
        assert out == "" and "stopped before anything was measured" in err


def _wait_for(happened, timeout_s: float = 30.0) -> None:
    until = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--engine", "tgi"], "choose one of vllm, sglang"),
        (["--engine-args", "--x"], "belong to --engine"),
        (["--engine", "vllm", "--server", "http://127.0.0.1:9"], "choose one"),
        (["--engine", "vllm", "--set", "router=prefix"], "--engine-args"),
        (["--engine", "vllm", "--ranks", "2"], "as many ranks as its --layout"),
        (["--engine", "vllm", "--layout", "pcp2+ring"], "leave out +ring"),
        (["--engine", "vllm", "--layout", "prefill:tp1,decode:tp1"], "give one layout"),
        (["--engine", "vllm", "--engine-python", "/no/python"], "there is no program of that name"),
        (["--engine", "vllm", "--engine-args", "'"], "--engine-args"),
        (["--engine", "vllm", "--rate", "0"], "rate is 0.0; it must be above 0"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(words: list[str], sentence: str, stand_in: Path):
    result = CliRunner().invoke(app, ["run", *words])
    assert result.exit_code == 2 and sentence in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("model", "layout", "error", "sentence"),
    [
        ("no-such-model", "tp1", FileNotFoundError, "There is no model 'no-such-model'"),
        ("lab-5m", "tp3", ValueError, "3"),
    ],
)
def test_a_model_that_is_not_there_or_cannot_be_split_so(model, layout, error, sentence, stand_in: Path):
    with pytest.raises(error, match=sentence):
        run_engine("vllm", layout, seconds=1, model=model)


def test_a_name_that_only_the_engine_knows_is_left_to_it(stand_in: Path):
    run = run_engine("vllm", "tp1", num_requests=1, concurrency=1, model="somebody/some-model", length_scale=0.1)
    assert run.summary["engine"]["command"][2] == "somebody/some-model"


needs_vllm = pytest.mark.skipif(
    not os.environ.get("LABKIT_VLLM_PYTHON"), reason="LABKIT_VLLM_PYTHON names no Python with vLLM"
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_vllm
def test_the_flags_are_words_of_the_installed_vllm():
    asked = subprocess.run([*find_engine("vllm"), "--help=all"], capture_output=True, text=True, check=True)
    for layout in ("dp2xpp2xtp4", "pcp2xtp2xdcp2", "dp2xtp2xep4"):
        for word in deploy_flags("vllm", read_layout(layout)).flags:
            assert word.isdigit() or word in asked.stdout


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)
@needs_vllm
@pytest.mark.parametrize("layout", ["tp1", "tp2"])
def test_a_real_vllm_is_started_measured_and_ended(layout: str, nothing_of_vllm_is_left: None):
    run = run_engine(
        "vllm", layout, rate=2, seconds=5, model="lab-5m", length_scale=0.25, engine_args="--enforce-eager"
    )
    assert run.status == "finished" and run.summary["requests"]["failed"] == 0
    told = run.summary["engine"]
    assert told["version"] and told["metrics"]["generation_tokens"] >= sum(record.n for record in run.records)
    assert told["metrics"]["preemptions"] == 0 and told["metrics"]["kv_use"]["max"] < 1
    assert run.summary["tpot_ms"]["p50"] > 0


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)
@needs_vllm
@pytest.mark.parametrize(
    ("when", "number"), [("starting", signal.SIGINT), ("running", signal.SIGINT), ("running", signal.SIGKILL)]
)
def test_whatever_ends_a_run_on_a_real_vllm_nothing_of_it_is_left(
    when: str, number: signal.Signals, nothing_of_vllm_is_left: None
):
    words = ["run", "--engine", "vllm", "--layout", "tp2", "--model", "lab-5m", "--rate", "5", "--seconds", "120"]
    words += ["--length-scale", "0.25", "--warmup", "0", "--engine-args", "--enforce-eager"]
    sign, times = ("Loading safetensors", 1) if when == "starting" else ('"POST /v1/completions HTTP/1.1" 200', 12)
    seen, before = _times_in_logs(sign), set(_left_processes())
    shell = subprocess.Popen(
        [sys.executable, "-m", "labkit.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(repo_dir())}, preexec_fn=_hear_ctrl_c,
    )  # fmt: skip
    _wait_for(lambda: _times_in_logs(sign) >= seen + times, 300)
    shell.send_signal(number)
    out, err = shell.communicate(timeout=60)
    if number is signal.SIGKILL:  # nobody was there to remove files: the ranks end by themselves, the next start does
        _wait_for(lambda: not set(_left_processes()) - before, 60)
        remove_left()
        return
    assert shell.returncode == 130, err
    if when == "running":
        assert json.loads(out.splitlines()[-1])["requests"]["completed"] >= 1
    else:
        assert out == "" and "stopped before anything was measured" in err


def _times_in_logs(sign: str) -> int:
    return sum(log.read_text(errors="replace").count(sign) for log in home_dir().glob("runs/*/vllm.log"))


def _left_processes() -> list[psutil.Process]:
    """Processes of vLLM that are this test's children, or have no labkit above them: those are nobody else's run."""
    return [process for process in psutil.process_iter() if "vllm" in _words_of(process).lower() and _is_left(process)]


def _words_of(process: psutil.Process) -> str:
    try:
        return " ".join([process.name(), *process.cmdline()[:3]])
    except psutil.Error:
        return ""


def _is_left(process: psutil.Process) -> bool:
    try:
        above = process.parents()
    except psutil.Error:
        return False
    return os.getpid() in [other.pid for other in above] or not any("labkit" in _words_of(other) for other in above)


def _unmapped() -> set[Path]:
    """Files of vLLM in shared memory that no living process has mapped: left behind by somebody."""
    files = set(SHM.glob("vllm*"))
    maps = (Path(f"/proc/{pid}/maps") for pid in psutil.pids()) if files else ()
    used = "".join(_text_of(path) for path in maps)
    return {path for path in files if str(path) not in used}


def _text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@pytest.fixture
def nothing_of_vllm_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process of its family, and no file of it in shared memory or in its temporary folder."""
    folder, files, processes = tempfile.mkdtemp(prefix="lk"), _unmapped(), set(_left_processes())
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    yield
    assert not set(_left_processes()) - processes and not _unmapped() - files
    assert not list(Path(folder).glob("labkit-engine-*"))
    shutil.rmtree(folder)


def test_an_engine_that_is_not_installed_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("LABKIT_SGLANG_PYTHON", raising=False)
    with pytest.raises(EngineError, match="sglang is not installed beside labkit"):
        run_engine("sglang", "tp1", seconds=1)
