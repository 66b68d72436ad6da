"""Ranks that go wrong, under real torchrun.

Who went first is named within five seconds, and nothing is left running.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from labkit.cluster.pool import PoolFailure, RestartsExhausted
from labkit.engine.messages import Fault, Sampled
from tests.cluster.pool_harness import Harness, family, shm_folders, step_message, still_alive

pytestmark = pytest.mark.engine
_ROOT = Path(__file__).parents[2]


def _break(harness: Harness, epoch: int, fabric: str, harm: str) -> tuple[PoolFailure, list[int]]:
    """Rank 0 is put into a collective that rank 1 does not come to.

    Then rank 1 (or the launcher) is harmed.
    """
    pool = harness.pool
    harness.configure(epoch, "tp2", fabric)
    launcher = psutil.Process(pool.pids[1]).ppid()
    pids = [launcher, *family(launcher)]
    pool.send(0, step_message(epoch, 0, token=1))
    harness.rest(0.1)
    began = time.monotonic()
    if harm == "SIGKILL":
        os.kill(pool.pids[1], signal.SIGKILL)
    elif harm == "launcher":
        os.kill(launcher, signal.SIGKILL)
    else:
        pool.send(1, Fault(harm))
    failure = harness.failure(5.0)
    while pool.state != "failed" or still_alive(pids):
        harness.rest(0.05)
        assert time.monotonic() - began < 5.0, f"still running: {still_alive(pids)}"
    return failure, pids


@pytest.mark.slow
def test_each_fault_names_its_rank_and_the_pool_comes_back_three_times(tmp_path: Path) -> None:
    of_other_tests = shm_folders(os.getpid())
    harness = Harness(tmp_path)
    harness.start()
    try:
        failure, _ = _break(harness, 1, "shm", "raise")
        assert (failure.rank, failure.kind) == (1, "raised")
        assert "told to raise" in failure.error and "worker.py" in failure.traceback

        harness.do(harness.pool.restart())
        failure, _ = _break(harness, 2, "gloo", "SIGKILL")
        assert (failure.rank, failure.kind, failure.exit_code) == (1, "killed", -signal.SIGKILL)
        assert "SIGKILL" in failure.error

        harness.do(harness.pool.restart())
        failure, _ = _break(harness, 3, "shm", "exit")
        assert (failure.rank, failure.kind, failure.exit_code) == (1, "exited", 0)

        harness.do(harness.pool.restart())
        harness.configure(4, "tp2")
        answers = harness.ask(step_message(4, 0, token=3), 3)
        assert next(m.token_ids for _, m in answers if isinstance(m, Sampled)) == [6]
        failure, _ = _break(harness, 5, "shm", "launcher")
        assert (failure.rank, failure.kind) == (-1, "killed") and "torchrun" in failure.error

        with pytest.raises(RestartsExhausted, match=r"3 times within 10 minutes.*torchrun.*killed"):
            harness.do(harness.pool.restart())
    finally:
        harness.close()
    assert shm_folders(os.getpid()) == of_other_tests


_OWNER = """
import asyncio, sys
from pathlib import Path
from tests.cluster.pool_harness import Harness, step_message, family
import os
harness = Harness(Path(sys.argv[1]))
harness.start()
harness.configure(0, "tp2")
harness.pool.send(0, step_message(0, 0, token=1))
harness.rest(0.2)
print(*family(os.getpid()), flush=True)
harness.rest(60)
"""


def test_ranks_leave_when_their_owner_is_killed_even_in_a_collective(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(tmp_path)], cwd=_ROOT, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(still_alive(pids)) == 3, "torchrun and two ranks"
    assert len(shm_folders(owner.pid)) == 1
    owner.kill()
    owner.wait()
    began = time.monotonic()
    while still_alive(pids) or shm_folders(owner.pid):
        assert time.monotonic() - began < 5.0, f"left: {still_alive(pids)}, {shm_folders(owner.pid)}"
        time.sleep(0.05)
