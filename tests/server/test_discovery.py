"""Finding the server, or starting one: once, detached, and with a sentence when it does not work."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from real_server import all_gone, wait_until

from labkit.server import discovery
from labkit.server.client import ServerClient, ServerError


@pytest.fixture(autouse=True)
def own_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("LABKIT_RUNTIME", str(tmp_path))
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))
    yield tmp_path / "labkit"


@pytest.mark.engine
def test_two_starters_at_once_start_one_server_that_outlives_them(own_runtime: Path) -> None:
    code = (
        "from labkit.server.discovery import connect\n"
        "print(connect(model='lab-5m', ranks=1, memory_per_rank='64MiB').url)"
    )

    def starter(_: int) -> str:
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.strip()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        urls = list(pool.map(starter, range(2)))
    assert urls[0] == urls[1]
    found = discovery.find()
    assert found is not None and found.url == urls[0]
    try:
        with pytest.raises(ServerError, match="serves lab-5m, and you asked for lab-30m"):
            discovery.connect(model="lab-30m")
        with pytest.raises(ServerError, match="has 1 ranks, and you asked for 4"):
            discovery.connect(ranks=4)
        family = psutil.Process(found.pid).children(recursive=True)
    finally:
        found.client().shutdown()
    wait_until(lambda: not discovery._is_alive(found.pid) or all_gone([psutil.Process(found.pid)]), 30)
    wait_until(lambda: all_gone(family), 10)
    assert not (own_runtime / "server.json").exists()


def test_a_stale_entry_is_ignored_and_replaced(own_runtime: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    stale = discovery.Found("http://127.0.0.1:9", "t", gone.pid, "m", 1)
    assert discovery.register(stale) is None
    assert discovery.find() is None
    alive_but_silent = discovery.Found("http://127.0.0.1:9", "t", os.getpid(), "m", 1)
    assert discovery.register(alive_but_silent) is None
    assert discovery.find() is None
    assert json.loads((own_runtime / "server.json").read_text())["pid"] == os.getpid()


def test_only_ones_own_entry_is_removed(own_runtime: Path) -> None:
    discovery.register(discovery.Found("http://127.0.0.1:9", "t", os.getpid(), "m", 1))
    discovery.unregister("http://127.0.0.1:10")
    assert (own_runtime / "server.json").exists()
    discovery.unregister("http://127.0.0.1:9")
    assert not (own_runtime / "server.json").exists()


def test_no_server_and_no_start_is_a_sentence() -> None:
    with pytest.raises(ServerError, match="labkit serve"):
        discovery.connect(start=False)


def test_a_start_that_fails_shows_why() -> None:
    with pytest.raises(ServerError, match="no model 'lab-31m'.*Did you mean lab-30m"):
        discovery.connect(model="lab-31m")


def test_an_address_must_be_one() -> None:
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:8100"):
        ServerClient("127.0.0.1:80")
    with pytest.raises(ServerError, match="does not answer"):
        ServerClient("http://127.0.0.1:9").health()


def test_options_as_a_command_line_has_them() -> None:
    given = {"model": "m", "no_record": True, "graphs": False, "max_num_seqs": 8, "layout": None}
    assert discovery.arguments(given) == ["--model", "m", "--no-record", "--max-num-seqs", "8"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "nope"], "no model 'nope'"),
        (["--layout", "tp3x"], "tp3x"),
        (["--layout", "tp8", "--model", "lab-5m", "--ranks", "2"], "2"),
        (["--port", "70000"], "65535"),
        (["--memory-per-rank", "lots"], "256MiB"),
        (["--router", "magic"], "magic"),
        (["--host", "0.0.0.0"], "LABKIT_TOKEN"),
        (["--device", "tpu"], "cpu or cuda"),
        (["--step-timeout", "0"], "--step-timeout is 0"),
        (["--max-model-len", "999999999"], "positions"),
    ],
)
def test_bad_options_end_with_a_sentence(options: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LABKIT_TOKEN", raising=False)
    from typer.testing import CliRunner

    from labkit.server.__main__ import app

    result = CliRunner().invoke(app, ["serve", *options])
    assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output


def test_more_ranks_than_gpus_are_refused_before_any_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    from labkit.cluster.topology import Gpu, look_at_machine
    from labkit.server import options

    here = dataclasses.replace(look_at_machine(), gpus=(Gpu(0, "H100", 80 << 30),))
    monkeypatch.setattr(options, "look_at_machine", lambda: here)
    with pytest.raises(ValueError, match=r"4 ranks need 4 GPUs, one each.* has 1: take --ranks 1 .*--device cpu"):
        options.make_plan(options.ServeOptions(model="lab-5m", ranks=4))
    assert options.make_plan(options.ServeOptions(model="lab-5m")).num_ranks == 1
    assert options.make_plan(options.ServeOptions(model="lab-5m", ranks=4, device="cpu")).num_ranks == 4


@pytest.mark.parametrize("layout", ["tp1", "tp2", "dp2"])
def test_every_layout_of_a_pool_has_the_same_threads_a_rank(layout: str) -> None:
    from labkit.server.options import ServeOptions, make_plan

    plan = make_plan(ServeOptions(model="lab-5m", layout=layout, ranks=2))
    assert plan.threads == make_plan(ServeOptions(model="lab-5m", ranks=2)).threads >= 1
    assert make_plan(ServeOptions(model="lab-5m", layout=layout, ranks=2, threads=3)).threads == 3


def test_a_port_that_is_taken_is_a_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "labkit.server", "serve", "--model", "lab-5m", "--port", str(port)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2 and not ran.stdout and "Traceback" not in ran.stderr
    assert f"--port {port} on 127.0.0.1 is in use: give another one" in ran.stderr
    assert not list(tmp_path.glob("labkit/pool-*"))
