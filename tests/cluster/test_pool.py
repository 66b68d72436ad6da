"""Warm ranks under torchrun.

They start, answer, idle without CPU, stand beside another pool, and leave nothing.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from labkit.cluster.launcher import LaunchPlan
from labkit.cluster.pool import Pool, PoolConfig, PoolError, RestartsExhausted, default_run_dir
from labkit.engine.messages import Sampled, StepStats
from labkit.measure.recorder import RING_DTYPE
from tests.cluster.pool_harness import ECHO, Harness, family, shm_folders, step_message, still_alive


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    harness = Harness(tmp_path_factory.mktemp("pool"))
    harness.start()
    harness.configure(0, "tp2")
    yield harness
    harness.close()


def _ports(pids: list[int]) -> set[int]:
    return {
        connection.laddr.port
        for pid in pids
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.engine
def test_every_rank_says_hello_and_the_pool_is_ready(two: Harness) -> None:
    assert two.pool.state == "ready" and sorted(two.pool.hellos) == [0, 1]
    assert two.states[0] == "starting" and two.states[-1] == "ready"
    assert set(two.pool.pids.values()) <= set(family(os.getpid()))
    assert {hello.device for hello in two.pool.hellos.values()} == {"cpu"}


@pytest.mark.engine
def test_a_step_comes_back_sampled_first_then_with_its_collectives(two: Harness) -> None:
    two.configure(1, "tp2")
    answers = two.ask(step_message(1, 7, token=21), 3)
    from_first = [message for rank, message in answers if rank == 0]
    assert isinstance(from_first[0], Sampled) and from_first[0].token_ids == [42]
    for rank, message in answers:
        if isinstance(message, StepStats):
            rows = np.frombuffer(message.ring, RING_DTYPE)
            assert message.rank == rank and message.step_id == 7
            assert len(rows) == 1 and rows["bytes"][0] == 4
            assert message.start_ns <= rows["enter_ns"][0] <= rows["exit_ns"][0] <= message.end_ns


@pytest.mark.engine
def test_a_step_of_another_epoch_is_dropped(two: Harness) -> None:
    two.configure(2, "tp2")
    two.ask(step_message(1, 8, token=1), 0)
    answers = two.ask(step_message(2, 9, token=1), 3)
    assert {message.step_id for _, message in answers} == {9}


@pytest.mark.engine
def test_fabrics_can_change_with_a_layout(two: Harness) -> None:
    for epoch, fabric in enumerate(("gloo", "shm"), start=3):
        two.configure(epoch, "tp2", fabric)
        answers = two.ask(step_message(epoch, 0, token=4), 3)
        assert next(m.token_ids for _, m in answers if isinstance(m, Sampled)) == [8]


@pytest.mark.engine
def test_idle_ranks_use_no_cpu(two: Harness) -> None:
    ranks = [psutil.Process(pid) for pid in two.pool.pids.values()]
    before = [sum(rank.cpu_times()[:2]) for rank in ranks]
    two.rest(2.0)
    used = [sum(rank.cpu_times()[:2]) - was for rank, was in zip(ranks, before, strict=True)]
    assert max(used) < 0.2, "one that spins would have used 2 s"


@pytest.mark.engine
def test_two_pools_stand_beside_each_other_on_ports_of_their_own(two: Harness, tmp_path: Path) -> None:
    other = Harness(tmp_path, num_ranks=1)
    other.start()
    try:
        assert set(other.pool.pids.values()).isdisjoint(two.pool.pids.values())
        other.configure(0, "tp1")
        assert len(other.ask(step_message(0, 0, token=5), 2)) == 2
        launchers = [child.pid for child in psutil.Process().children() if "labkit.cluster.launch" in child.cmdline()]
        assert len(launchers) == 2
        first, second = (_ports([launcher, *family(launcher)]) for launcher in launchers)
        assert first and second and not first & second and 29500 not in first | second
    finally:
        pids = [*other.pool.pids.values()]
        other.close()
    assert still_alive(pids) == []
    assert two.pool.state == "ready"


@pytest.mark.engine
def test_stop_leaves_no_process_socket_or_shared_memory(tmp_path: Path) -> None:
    harness = Harness(tmp_path, num_ranks=1)
    before = set(shm_folders(os.getpid()))
    harness.start()
    pids = [*harness.pool.pids.values()]
    began = time.monotonic()
    harness.close()
    assert time.monotonic() - began < 5
    assert still_alive(pids) == []
    assert list(tmp_path.iterdir()) == []
    assert set(shm_folders(os.getpid())) == before
    assert harness.pool.state == "stopped"


@pytest.mark.engine
@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked under Linux only")
def test_forked_ranks_have_no_part_of_their_torchrun(two: Harness) -> None:
    """Not the owner's pipe, which ends it, and not its handlers of signals; and its code is in memory once."""
    for pid in two.pool.pids.values():
        assert os.readlink(f"/proc/{pid}/fd/0") == os.devnull
        caught = int(re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1], 16)  # type: ignore[index]
        assert not caught >> (signal.SIGTERM - 1) & 1
        memory = psutil.Process(pid).memory_full_info()
        assert memory.uss < memory.rss / 2


@pytest.mark.engine
def test_ranks_started_as_commands_answer_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are beside GPUs, and on macOS."""
    monkeypatch.setattr(LaunchPlan, "forks", lambda self: False)
    harness = Harness(tmp_path)
    harness.start()
    try:
        assert all(ECHO in psutil.Process(pid).cmdline() for pid in harness.pool.pids.values())
        harness.configure(0, "tp2")
        answers = harness.ask(step_message(0, 0, token=4), 3)
        assert next(m.token_ids for _, m in answers if isinstance(m, Sampled)) == [8]
    finally:
        harness.close()


@pytest.mark.engine
def test_ranks_that_cannot_start_say_why_with_the_end_of_their_log(tmp_path: Path) -> None:
    harness = Harness(tmp_path, num_ranks=1, module="tests.cluster.no_such_worker")
    with pytest.raises(PoolError, match=r"(?s)rank 0 exited with status 1.*No module named.*no_such_worker"):
        harness.start()
    assert harness.pool.state == "failed"
    harness.close()


def test_ranks_that_do_not_report_in_time_are_counted(tmp_path: Path) -> None:
    before = family(os.getpid())
    harness = Harness(tmp_path, start_timeout_s=0.2)
    with pytest.raises(PoolError, match=r"2 of 2 ranks did not report within 0\.2 s \(ranks 0, 1\)"):
        harness.start()
    assert set(still_alive(family(os.getpid()))) <= set(before)
    harness.close()


def test_stopping_a_pool_that_is_starting_ends_the_start(tmp_path: Path) -> None:
    import asyncio

    harness = Harness(tmp_path, num_ranks=1)

    async def play() -> None:
        start = asyncio.create_task(harness.pool.start())
        await asyncio.sleep(0.3)
        await harness.pool.stop()
        with pytest.raises(PoolError, match="stopped before its ranks were ready"):
            await start

    harness.do(play(), 10)
    assert harness.pool.state == "stopped"


def test_the_fourth_restart_in_ten_minutes_is_refused(tmp_path: Path) -> None:
    """Each start fails at once, since its ranks have no time to come."""
    harness = Harness(tmp_path, num_ranks=1, start_timeout_s=0.01)
    for _ in range(3):
        with pytest.raises(PoolError, match="did not report"):
            harness.do(harness.pool.restart())
    assert harness.pool.restarts_left == 0
    with pytest.raises(RestartsExhausted, match=r"3 times within 10 minutes.*did not report within 0\.01 s"):
        harness.do(harness.pool.restart())
    harness.close()


def test_what_a_killed_owner_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead, living = tmp_path / f"pool-{gone.pid}-00ff", tmp_path / f"pool-{os.getpid()}-00ff"
    for folder in (dead, living):
        (folder / "start-1").mkdir(parents=True)
    (tmp_path / "pool-notes-mine").mkdir()
    mine = default_run_dir(tmp_path)
    assert not dead.exists() and living.exists() and (tmp_path / "pool-notes-mine").exists()
    assert mine.name.startswith(f"pool-{os.getpid()}-") and not mine.exists()


def test_starting_twice_is_refused(two: Harness) -> None:
    with pytest.raises(PoolError, match="has been started and is ready"):
        two.start()


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [("num_ranks", 0, "at least one rank"), ("threads", 0, "at least one rank"), ("device", "tpu", "cpu or cuda")],
)
def test_a_pool_that_cannot_be_is_refused(field: str, value: object, sentence: str, tmp_path: Path) -> None:
    given = {"num_ranks": 1, "threads": 1, "device": "cpu", "backend": "gloo", "run_dir": tmp_path, field: value}
    with pytest.raises(ValueError, match=sentence):
        PoolConfig(**given)  # type: ignore[arg-type]


def test_sending_before_the_start_is_silent(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.pool.send(0, step_message(0, 0, 1))
    assert isinstance(harness.pool, Pool) and harness.pool.state == "stopped"


def test_the_cluster_room_does_not_import_torch() -> None:
    code = (
        "import sys, labkit.cluster.pool, labkit.cluster.launch, labkit.cluster.topology;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
