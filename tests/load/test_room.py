"""The room stays light, and its client is true: checked in processes of their own."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from labkit.load.driver import DriverProcess
from labkit.paths import repo_dir

HEAVY = ("torch", "pandas", "plotly", "aiohttp", "transformers", "IPython")
SOURCE = repo_dir().parent / "shared" / "tools" / "known-schedule-server" / "server.c"
needs_server = pytest.mark.skipif(
    not SOURCE.is_file() or shutil.which("cc") is None,
    reason="needs a C compiler and the known-schedule server in ../shared/tools",
)


def test_the_room_imports_nothing_heavy():
    names = sorted(path.stem for path in (repo_dir() / "labkit" / "load").glob("*.py") if path.stem != "__init__")
    code = "import sys\n" + "".join(f"import labkit.load.{name}\n" for name in names)
    code += f"print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=repo_dir(), check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture(scope="module")
def truth():
    folder = str(repo_dir() / "benchmarks")
    sys.path.insert(0, folder)
    yield importlib.import_module("client_truth")
    sys.path.remove(folder)


def test_the_benchmark_says_so_when_the_server_is_not_there(truth, tmp_path):
    with pytest.raises(SystemExit, match="give its C file with --source"):
        truth.build(tmp_path / "server.c", tmp_path)


@needs_server
def test_every_habit_of_servers_is_read_right_and_ttft_is_true(truth):
    """Loosely bounded: the suite runs on busy machines. The benchmark has the real bounds."""
    with tempfile.TemporaryDirectory() as folder, DriverProcess() as driver:
        binary = truth.build(SOURCE, Path(folder))
        report, truths = truth.measure(driver, binary, (), 50.0, 3.0)
        row = truth.accuracy(50.0, report, truths)
        assert row["n"] == 150 and abs(row["ttft_off_p50_ms"]) < 2 and row["tpot_off_p50_ms"] < 0.2
        assert row["rate_off_percent"] < 0.5
        exact = {habit.name: habit for habit in truth.HABITS}
        for name in ("four, with usage", "every 5th fails", "every 5th is cut"):
            report, truths = truth.measure(driver, binary, exact[name].options, 40.0, 1.0)
            assert exact[name].check(report, truths), name
