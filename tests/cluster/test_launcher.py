"""What torchrun and its ranks are told: loopback, ports that nobody chose, explicit threads, an importable module."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from labkit.cluster.launcher import LaunchPlan, loopback_interface
from labkit.paths import repo_dir


def plan(folder: Path, threads: int = 3) -> LaunchPlan:
    return LaunchPlan(4, threads, "cpu", "labkit.engine.worker", folder, folder / "shm", "unix:x", folder / "token")


def test_ranks_meet_on_loopback_at_a_port_that_the_system_picks(tmp_path: Path) -> None:
    """So neither a VPN, nor a hostname that does not resolve, nor a second lab on the machine does harm."""
    command, environment = plan(tmp_path).command(), plan(tmp_path).environment()
    assert "--rdzv-endpoint=127.0.0.1:0" in command and "--local-addr=127.0.0.1" in command
    assert environment["GLOO_SOCKET_IFNAME"] == environment["NCCL_SOCKET_IFNAME"] == loopback_interface()
    assert "29500" not in " ".join(command) and "MASTER_PORT" not in environment
    assert command != plan(tmp_path).command(), "two pools share a rendezvous"


def test_threads_are_explicit_whatever_the_shell_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "14")
    assert plan(tmp_path, threads=3).environment()["OMP_NUM_THREADS"] == "3"


def test_ranks_are_a_module_that_is_found_from_any_folder(tmp_path: Path) -> None:
    command, environment = plan(tmp_path).command(), plan(tmp_path).environment()
    assert command[-2:] == ["-m", "labkit.engine.worker"]
    assert environment["PYTHONPATH"].split(":")[0] == str(repo_dir())


@pytest.mark.parametrize(("device", "system", "forks"), [
    ("cpu", "linux", True), ("cpu", "darwin", False), ("cuda", "linux", False),
])  # fmt: skip
def test_ranks_are_forked_only_where_that_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, system: str, forks: bool
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    command = replace(plan(tmp_path), device=device).command()
    assert ("--start-method=fork" in command) is forks
    assert command[-2:] == ["-m", "labkit.engine.worker"]


_CELL = """
from pathlib import Path
from tests.cluster.pool_harness import Harness, step_message
harness = Harness(Path("RUN"), num_ranks=1)
harness.start()
harness.configure(0, "tp1")
print(len(harness.ask(step_message(0, 0, token=5), 2)))
harness.close()
"""


@pytest.mark.engine
def test_ranks_start_from_a_notebook_cell_which_nobody_can_import(tmp_path: Path) -> None:
    """A cell's code, like that of stdin, is in no file: a function of it could not be a rank."""
    cell = _CELL.replace("RUN", str(tmp_path / "run"))
    ran = subprocess.run(
        [sys.executable, "-"], input=cell, cwd=repo_dir(), capture_output=True, text=True, timeout=90
    )
    assert ran.stdout.split() == ["2"], ran.stderr
