"""`labkit calibrate`: what it refuses, what it makes the engine do, and (slow) a short one on real ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from labkit.cli import app
from labkit.lab import calibrate_quiet
from labkit.lab.calibrate_load import BURSTS, DECODED_TOKENS, PREFILLS, phases
from labkit.lab.calibrate_plan import default_layouts, plan_of
from labkit.lab.calibrate_quiet import Others, notes_of, require_quiet
from labkit.load.schedule import make_schedule
from labkit.plan.calibration import load_calibration
from labkit.plan.work import StepWork


def test_a_busy_machine_is_refused_with_figures_and_a_way_out():
    require_quiet(0.1)
    require_quiet(0.9, anyway=True)
    with pytest.raises(ValueError, match=r"Other processes have \d.* cores .*load average .*--anyway"):
        require_quiet(0.9)


def test_a_noisy_calibration_and_one_without_a_core_to_spare_say_so():
    cores = os.cpu_count() or 1
    assert notes_of(0.0, max(0, cores - 1)) == ()
    noisy, crowded, drifting = notes_of(0.5, cores, drift=0.2)
    assert "20% from one second to another" in drifting
    assert "others had" in noisy and f"{cores} ranks" in crowded


def test_what_others_use_is_told_from_what_we_use():
    burn = "import time\nwhile True: pass"
    ours, theirs = (subprocess.Popen([sys.executable, "-c", burn]) for _ in range(2))
    try:
        time.sleep(0.3)
        with_both, with_one = Others([ours.pid, theirs.pid]), Others([ours.pid])
        time.sleep(0.6)
        assert with_one.share() > with_both.share()
    finally:
        for process in (ours, theirs):
            process.kill()
            process.wait()


def test_the_command_refuses_in_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    monkeypatch.setattr("labkit.lab.calibrate_plan.look", lambda: 0.8)
    for words, said in (
        ([], "--anyway"),
        (["--model", "lab-31m"], "Did you mean lab-30m"),
        (["--layout", "tp3"], "tp 3"),
        (["--layout", "tp4", "--ranks", "2"], "4 ranks"),
        (["--layout", "prefill:tp1,decode:tp1"], "one by one"),
        (["--ranks", "-1"], "--ranks is -1"),
    ):
        done = CliRunner().invoke(app, ["calibrate", *words])
        assert done.exit_code == 2 and said in done.stderr, (words, done.stderr)
    assert not list(tmp_path.rglob("*.toml"))


def test_the_default_is_one_split_of_each_kind():
    assert [layout.slug for layout in default_layouts(2)] == ["tp1", "tp2", "dp2", "pp2"]
    assert [layout.slug for layout in default_layouts(4)][4:] == ["tp4", "dp4", "pp4"]
    assert [layout.slug for layout in plan_of("lab-30m", ["tp2", "tp2"], 2).layouts] == ["tp2"]
    assert default_layouts(1)[0].slug == "tp1" and len(default_layouts(1)) == 1


@pytest.mark.parametrize("longest", [128, 2048, 8192])
def test_the_designed_load_fits_the_model_and_keeps_prompts_apart(longest: int):
    for replicas in (1, 2):
        for phase in phases(longest, replicas):
            schedule = make_schedule(phase.workload, num_requests=phase.num_requests, concurrency=phase.concurrency,
                                     seed=1, max_context=longest)  # fmt: skip
            assert schedule.num_cut == 0 and len(schedule.requests) == phase.num_requests
            assert not phase.lone or phase.concurrency == 1


def test_the_designed_load_has_every_batch_of_each_replica_and_every_prompt_length():
    work = phases(8192, 2)
    bursts = [phase for phase in work if not phase.concurrency]
    asked = {(phase.num_requests, phase.workload.parts[0].prompt_tokens.max_tokens) for phase in bursts}
    assert {(2 * size, lengths[1]) for lengths, sizes in BURSTS for size in sizes} <= asked
    assert any(phase.num_requests == 1 for phase in bursts), "one replica alone"
    assert {phase.workload.parts[0].prompt_tokens.tokens for phase in work if phase.lone} == set(PREFILLS)
    assert all(phase.workload.parts[0].output_tokens.tokens == DECODED_TOKENS for phase in bursts)
    assert sum(p.num_requests for p in phases(8192, 1, 0.5)) < sum(p.num_requests for p in phases(8192, 1)) / 1.3


def _calibrate(home: Path, *words: str, **more: object) -> subprocess.Popen[str]:
    runtime = home / "runtime"
    runtime.mkdir(mode=0o700, exist_ok=True)
    env = {**os.environ, "LABKIT_HOME": str(home), "LABKIT_RUNTIME": str(runtime)}
    command = [sys.executable, "-m", "labkit.cli", "calibrate", "--model", "lab-5m", "--anyway", "--quick", *words]
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)  # type: ignore[call-overload]


@pytest.mark.engine
@pytest.mark.slow
def test_a_short_calibration_on_real_ranks_is_kept_and_predicts_steps(tmp_path: Path):
    process = _calibrate(tmp_path, "--layout", "tp1", "--layout", "pp2", "--ranks", "2", "--json")
    out, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    summary = json.loads(out.splitlines()[-1])
    assert len(out.splitlines()) == 1 and set(summary["layouts"]) == {"tp1", "pp2"}
    found = load_calibration(summary["path"])
    assert found.about["num_ranks"] == 2 and "load_average_before" in found.about
    one, many = (StepWork(decodes=n, decode_context=99 * n, decode_window_context=99 * n, logits=n) for n in (1, 16))
    for layout in ("tp1", "pp2"):
        cost = found.cost(layout)
        assert 0 < cost.seconds(one) < cost.seconds(many) and len(cost.stages) == (2 if layout == "pp2" else 1)
        assert cost.interval(many) <= cost.seconds(many) and found.layouts[layout].num_steps > 100
        assert 0 < cost.client.request_s + cost.client.first_token_s < 1


@pytest.mark.engine
@pytest.mark.slow
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path):
    before = set(Path(tempfile.gettempdir()).glob("labkit-calibrate-*"))
    process = _calibrate(tmp_path, "--layout", "tp1", "--ranks", "2", start_new_session=True)
    assert process.stderr is not None
    seen = ""
    while "TP1" not in seen:
        line = process.stderr.readline()
        assert line, seen
        seen += line
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert not list(tmp_path.rglob("*.toml"))
    assert set(Path(tempfile.gettempdir()).glob("labkit-calibrate-*")) <= before
    psutil.wait_procs(children, timeout=20)
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def test_looking_takes_a_moment_and_gives_a_share():
    assert 0 <= calibrate_quiet.look(0.05) <= 1
