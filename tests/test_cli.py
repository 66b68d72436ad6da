"""The shell: what is printed, in which words things are refused, and what it costs to start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from labkit.cli import app
from labkit.lab.running import begin, finish
from labkit.lab.summary import Setting
from labkit.layout import legal_layouts
from labkit.model.spec import load_spec
from tests.test_lab import _recording, _where

SHELL = CliRunner()


def _ask(*words: str, code: int = 0):
    result = SHELL.invoke(app, list(words))
    assert result.exit_code == code, result.output + result.stderr
    return result


@pytest.fixture
def stored() -> str:
    recording = _recording()
    begin(recording, "tp2", "lab-5m", "http://127.0.0.1:1")
    return finish(recording, _where()).run_id


def test_layouts_as_json_say_what_is_legal_and_why_the_rest_is_not():
    found = json.loads(_ask("layouts", "--model", "lab-5m", "--ranks", "4", "--json").stdout)
    assert {"tp1", "tp2", "dp2xtp2"} <= {entry["layout"] for entry in found["legal"]}
    assert found["refused"] and all(
        entry["layout"] and entry["reason"].endswith(".") for entry in found["refused"]
    )
    runs_here = json.loads(_ask("layouts", "--model", "lab-5m", "--ranks", "4", "--engine", "--json").stdout)
    slugs = [entry["layout"] for entry in runs_here["legal"]]
    assert {"tp1", "tp2", "tp4", "dp2", "dp3", "dp4", "dp2xtp2", "pp2", "pp4", "pp2xtp2"} <= set(slugs)
    spec = load_spec("lab-5m")
    assert slugs == [layout.slug for layout in legal_layouts(spec, 4, engine=True)]


def test_pools_with_roles_are_listed_beside_the_layouts():
    found = json.loads(_ask("layouts", "--model", "lab-5m", "--ranks", "3", "--engine", "--json").stdout)
    slugs = [entry["layout"] for entry in found["pools"]]
    assert slugs == ["prefill:tp1,decode:tp1", "prefill:tp1,decode:tp2", "prefill:tp2,decode:tp1", "any:tp1,long:pcp2"]


def test_explain_says_what_it_can_and_grows_with_a_second_run(stored: str):
    assert "TTFT p50:" in _ask("explain", "last").stdout
    told = json.loads(_ask("explain", stored, stored, "--json").stdout)
    assert told["label"] == told["other"]["label"] and told["steady"]["sentence"] and len(told["verdicts"]) == 4


def test_layouts_in_words():
    text = _ask("layouts", "--model", "lab-5m", "--ranks", "3").stdout
    assert "tp2" in text and "not tp3:" in text


def test_runs_and_export(stored: str, tmp_path: Path):
    assert stored in _ask("runs").stdout
    listed = json.loads(_ask("runs", "--json").stdout)
    assert listed[0]["run_id"] == stored and listed[0]["workload"] == "chat"
    path = tmp_path / "out.json"
    assert str(path) in _ask("export", stored, str(path)).stdout
    assert json.loads(path.read_text())["completed"] == 40
    _ask("export", "last", str(tmp_path / "tables"), "--format", "parquet")
    assert (tmp_path / "tables" / "requests.parquet").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["export", "nobody", "x.json"], "no run 'nobody'"),
        (["explain", "nobody"], "no run 'nobody'"),
        (["layouts", "--model", "no-such-model"], "no-such-model"),
        (["run", "--objective", "speed=3", "--server", "http://127.0.0.1:9"], "ttft=MS"),
        (["run", "--workload", "nonsense", "--server", "http://127.0.0.1:9"], "chat"),
        (["run", "--rate", "2", "--concurrency", "2", "--server", "http://127.0.0.1:9"], "choose one"),
        (["run", "--rate", "0", "--server", "http://127.0.0.1:9"], "rate is 0.0; it must be above 0"),
        (["run", "--rate", "-1", "--server", "http://127.0.0.1:9"], "rate is -1.0; it must be above 0"),
        (["run", "--rate", "nan", "--server", "http://127.0.0.1:9"], "rate is nan; it must be above 0"),
        (["run", "--seconds", "0", "--server", "http://127.0.0.1:9"], "seconds is 0.0; it must be above 0"),
        (["run", "--seconds", "-3", "--server", "http://127.0.0.1:9"], "seconds is -3.0"),
        (["run", "--num-requests", "0", "--server", "http://127.0.0.1:9"], "num_requests is 0"),
        (["run", "--length-scale", "0", "--server", "http://127.0.0.1:9"], "length_scale is 0.0"),
        (["run", "--concurrency", "-2", "--server", "http://127.0.0.1:9"], "concurrency is -2"),
        (["compare", "tp1", "tp2", "--rate", "0"], "rate is 0.0; it must be above 0"),
        (["run", "--layout", "tp2", "--server", "http://127.0.0.1:9"], "layout cannot be chosen"),
        (["run", "--server", "ftp://x"], "ftp://x"),
        (["compare", "tp1", "--server", "http://127.0.0.1:9"], "two or more"),
        (["run", "--set", "router", "--server", "http://127.0.0.1:9"], ""),
    ],
)
def test_refusals_are_one_sentence_and_exit_code_2(words: list[str], sentence: str):
    result = _ask(*words, code=2)
    assert sentence in result.stderr and result.stderr.startswith("labkit: ") and not result.stdout
    assert "Traceback" not in result.stderr


def test_a_summary_greys_what_is_too_few_and_shows_every_verdict():
    from rich.console import Console

    from labkit.lab import screen

    run = finish_unstored()
    console = Console(record=True, width=160, force_terminal=True)
    with console.capture() as captured:
        console.print(screen.summary(run))
    text = captured.get()
    assert "TTFT, ms" in text and "40 of 40 requests completed" in text
    assert "Too few" in text and "\x1b[2m" in text  # dim


def finish_unstored() -> dict:
    from labkit.lab.summary import build_summary

    recording = _recording()
    return build_summary(
        recording.plan, _where(), recording.records, recording.steps, recording.report, run_id="r"
    )


def test_a_foreign_run_prints_too():
    from rich.console import Console

    from labkit.lab import screen
    from labkit.lab.summary import build_summary

    recording = _recording()
    summary = build_summary(
        recording.plan, Setting(model="m"), recording.records, [], recording.report, run_id="r"
    )
    console = Console(width=160)
    with console.capture() as captured:
        console.print(screen.summary(summary))
    assert "foreign server" in captured.get()


def test_starting_the_shell_imports_nothing_heavy():
    code = (
        "import sys, labkit.cli; "
        "print([m for m in ('torch', 'numpy', 'pandas', 'aiohttp', 'msgspec') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_every_command_has_a_sentence_of_help():
    text = _ask("--help").stdout
    names = ("run", "compare", "layouts", "runs", "export", "explain", "import", "serve", "switch", "status", "stop")
    for command in names:
        assert command in text


def test_a_run_is_exported_under_its_own_name(stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for kind, name in (("vllm", f"{stored}.json"), ("trace", f"{stored}.trace.json"), ("csv", stored)):
        _ask("export", stored, "--format", kind)
        assert (tmp_path / name).exists()
