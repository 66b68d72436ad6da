"""A production engine's server: its command, its log, and that nothing of it is left; the servers are stand-ins."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from labkit.cluster.engine_log import LogFollower, plain_line
from labkit.cluster.engine_plan import EngineError, EnginePlan, find_engine
from labkit.cluster.engine_shm import SHM
from labkit.cluster.engines import started
from labkit.cluster.topology import Gpu, Machine

pytestmark = pytest.mark.engine  # one start removes what any other has left behind

STAND_IN = Path(__file__).with_name("stand_in_engine.py")
CPU = Machine("here", 4, 1 << 34, 1 << 33, None, (), "none")
GPUS = Machine("there", 64, 1 << 40, 1 << 40, None, (Gpu(0, "H200", 1 << 37),), "")


def _plan(engine: str = "vllm", **more: object) -> EnginePlan:
    program = [sys.executable, str(STAND_IN), "serve"]
    fields = {"model": "a-model", "flags": ["--tensor-parallel-size", "2"], "num_ranks": 2}
    return EnginePlan(engine, program, **(fields | more))  # type: ignore[arg-type]


# ---- commands


def test_the_command_is_model_place_flags_and_the_users_words_last():
    plan = EnginePlan("vllm", ["vllm", "serve"], "m", ["--tensor-parallel-size", "2"], 2, {}, ["--dtype", "bfloat16"])
    assert " ".join(plan.command(8001, CPU)) == (
        "vllm serve m --dtype float32 --host 127.0.0.1 --port 8001 --served-model-name model "
        "--tensor-parallel-size 2 --dtype bfloat16"
    )
    assert "--dtype float32" not in " ".join(plan.command(8001, GPUS))


def test_the_command_of_sglang():
    plan = EnginePlan("sglang", ["py", "-m", "sglang.launch_server"], "m", ["--tp-size", "2"], 2)
    assert " ".join(plan.command(8001, GPUS)) == (
        "py -m sglang.launch_server --model-path m --enable-metrics --host 127.0.0.1 --port 8001 "
        "--served-model-name model --tp-size 2"
    )


def test_on_cpus_each_rank_is_told_its_cores_unless_the_user_did(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    assert _plan().variables(CPU)["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in _plan().variables(GPUS)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|3")
    assert _plan().variables(CPU)["VLLM_CPU_OMP_THREADS_BIND"] == "0|3"


def test_more_ranks_than_cores_share_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 7}, raising=False)
    assert _plan(num_ranks=4).cores_by_rank() == "5|7|5|7"


def test_an_engine_is_found_by_option_variable_path_and_missed_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.delenv("LABKIT_VLLM_PYTHON", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match=r"vllm is not installed beside labkit.*--engine-python PATH or LABKIT_VLLM"):
        find_engine("vllm")
    script, python = tmp_path / "vllm", tmp_path / "python"
    for path in (script, python):
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    assert find_engine("vllm") == [str(script), "serve"]
    monkeypatch.setenv("LABKIT_VLLM_PYTHON", sys.executable)
    with pytest.raises(EngineError, match=r"\(from LABKIT_VLLM_PYTHON\) has no vllm"):
        find_engine("vllm")
    assert find_engine("vllm", str(python)) == [str(script), "serve"]
    with pytest.raises(EngineError, match="--engine-python is /no/python, and there is no program"):
        find_engine("sglang", "/no/python")


# ---- the log


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("\x1b[0;36m(APIServer pid=42)\x1b[0;0m INFO 11-30 02:58:31 [launcher.py:29] Route: /x", "Route: /x"),
        ("(EngineCore_DP0 pid=4) ERROR 11-30 02:58:31 [core.py:708] no room", "ERROR: no room"),
        ("(Worker_TP1 pid=7) WARNING 11-30 02:58:31 [cpu.py:1] slow", "WARNING: slow"),
        ("INFO:     Application startup complete.", "INFO:     Application startup complete."),
        ("  ", ""),
        ("(APIServer pid=42) INFO 11-30 02:58:31 [utils.py:293]  █▄▄▄▄ ▀▀▀▀", ""),
    ],
)
def test_a_line_of_the_log_without_its_place_and_time(line: str, said: str):
    assert plain_line(line) == said


def test_a_line_is_told_once_it_is_whole(tmp_path: Path):
    log = tmp_path / "log"
    log.write_bytes(b"one\ntw")
    follow = LogFollower(log)
    assert follow.new_lines() == ["one"] and follow.new_lines() == []
    with log.open("ab") as more:
        more.write(b"o\r 50%\r100%\n\nthree")
    assert follow.new_lines() == ["two", "50%", "100%"]


# ---- a server's life


@pytest.fixture
def shared_file(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file in shared memory that the stand-in maps and leaves; gone after the test whatever came of it."""
    if not SHM.is_dir():
        pytest.skip("this system has no /dev/shm")
    path = SHM / f"labkit-test-stand-in-{secrets.token_hex(6)}"
    monkeypatch.setenv("STAND_IN_SHM", str(path))
    yield path
    path.unlink(missing_ok=True)


def test_a_stand_in_starts_with_its_log_in_sight_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    note, lines = tmp_path / "child", []
    monkeypatch.setenv("STAND_IN_CHILD", str(note))
    with started(_plan(), CPU, tmp_path / "log", lambda at_s, line: lines.append((at_s, line))) as server:
        assert server.version() == "stand-in"
        assert server.served()["max_model_len"] == 4096
        family = [server.pid, int(note.read_text())]
        scratch = psutil.Process(server.pid).environ()["TMPDIR"]
        assert all(psutil.pid_exists(pid) for pid in family) and Path(scratch).is_dir()
        server.check()
    assert "Loading weights took 0.01 seconds" in [line for _, line in lines]
    assert "--tensor-parallel-size 2" in lines[0][1] and lines[0][0] <= lines[-1][0]
    assert not any(psutil.pid_exists(pid) for pid in family) and not Path(scratch).exists()


def test_what_a_stand_in_maps_in_shared_memory_goes_with_it_and_what_others_have_there_stays(
    shared_file: Path, tmp_path: Path
):
    others = shared_file.with_name(f"{shared_file.name}-others")
    try:
        with started(_plan(), CPU, tmp_path / "log"):
            others.touch()
            assert shared_file.exists()
        assert not shared_file.exists() and others.exists()
    finally:
        others.unlink(missing_ok=True)


def test_a_stand_in_that_is_deaf_to_signals_is_ended_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STAND_IN_DEAF", "1")
    monkeypatch.setattr("labkit.cluster.engines._GRACE_S", 0.2)
    with started(_plan(), CPU, tmp_path / "log") as server:
        pid = server.pid
    assert not psutil.pid_exists(pid)


def test_a_stand_in_that_dies_before_it_is_healthy_says_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STAND_IN_DIES", "1")
    with pytest.raises(EngineError) as failure, started(_plan(), CPU, tmp_path / "log"):
        pass
    assert "The vllm server ended with exit code 3." in str(failure.value)
    assert str(failure.value).endswith("ValueError: no room for the KV cache")


def test_a_stand_in_that_takes_too_long_is_ended(tmp_path: Path):
    with (
        pytest.raises(EngineError, match="not healthy after 0 s"),
        started(_plan(), CPU, tmp_path / "log", timeout_s=0.0),
    ):
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child when its starter is killed")
def test_a_stand_in_goes_when_its_starter_is_killed(tmp_path: Path, shared_file: Path, monkeypatch: pytest.MonkeyPatch):
    code = f"""
        import sys, time
        from pathlib import Path
        from labkit.cluster.engine_plan import EnginePlan
        from labkit.cluster.engines import started
        from labkit.cluster.topology import look_at_machine
        plan = EnginePlan("vllm", [sys.executable, {str(STAND_IN)!r}, "serve"], "m", [], 1)
        with started(plan, look_at_machine(), Path({str(tmp_path / "log")!r})) as server:
            print(server.pid, flush=True)
            time.sleep(600)
    """
    starter = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    until = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not psutil.pid_exists(pid)
    left = f"labkit-engine-{os.getuid()}-{starter.pid}-*"
    assert list(Path(tempfile.gettempdir()).glob(left)), "nobody was there to remove its temporary files"
    assert shared_file.exists()
    monkeypatch.delenv("STAND_IN_SHM")
    with started(_plan(), CPU, tmp_path / "next"):
        assert not list(Path(tempfile.gettempdir()).glob(left)) and not shared_file.exists(), "the next start does"
