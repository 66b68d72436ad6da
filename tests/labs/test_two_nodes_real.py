"""A lesson's own server and its nodes go when its kernel does, in order or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.made_nodes import needs_nodes, of_owner, wait_gone

pytestmark = [needs_nodes, pytest.mark.engine, pytest.mark.slow]
KERNEL = """
import sys
from labkit.lab import connect
from labkit.teach.beside import two_halves
server = two_halves("lab-5m", 1, "200mbit")
with connect(server.where["url"], server.where["token"]) as lab:
    lab.wait_ready()
    lab.switch("tp2", probe=False)
    before = server.link_bytes()
    lab.client.complete([1, 2, 3], max_tokens=8, ignore_eos=True)
    print(server.found.pid, server.link_bytes() - before, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("killed", [False, True], ids=["ended", "killed"])
def test_nothing_is_left_of_a_kernel_that_went(tmp_path: Path, killed: bool):
    env = {**os.environ, "LABKIT_HOME": str(tmp_path), "LABKIT_RUNTIME": str(tmp_path)}
    kernel = subprocess.Popen([sys.executable, "-c", KERNEL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    assert kernel.stdin is not None and kernel.stdout is not None
    pid, sent = map(int, kernel.stdout.readline().split())
    assert of_owner(pid) and sent > 10 * 13 * 1024  # ten tokens, 13 sums of a row of 1 KiB, each way over the link
    if killed:
        kernel.send_signal(signal.SIGKILL)
    kernel.stdin.close()
    kernel.wait(timeout=30)
    wait_gone(pid, 30.0)
    if not killed:
        time.sleep(0.1)
        assert not list((tmp_path / "labkit").glob("own-*"))
