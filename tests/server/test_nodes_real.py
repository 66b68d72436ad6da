"""`labkit serve` over nodes: made on this machine, and real ones that join, tried across two namespaces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_server import RealServer, all_gone, wait_until

from labkit.cluster.namespaces import INTERFACE, Wiring, destroy, inside, make, owned_name
from tests.cluster.made_nodes import needs_nodes, of_owner
from tests.cluster.pool_harness import shm_folders

pytestmark = [needs_nodes, pytest.mark.engine]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": 8}
PROMPT = list(range(7, 207))


def _ids(server: RealServer) -> list[int]:
    return list(server.client.complete(PROMPT, **GREEDY)["choices"][0]["token_ids"])


def test_a_server_over_two_nodes_says_so_serves_and_leaves_nothing_when_killed(tmp_path: Path) -> None:
    options = ("--nodes", "2", "--ranks-per-node", "2", "--link", "200mbit", "--memory-per-rank", "64MiB")
    server = RealServer(tmp_path, *options)
    wait_until(lambda: server.client.health() == "ready", 60)
    unsplit = _ids(server)
    for layout, spans in (("tp2", False), ("tp4", True)):
        server.client.switch(layout)
        assert _ids(server) == unsplit
        state = server.client.state()
        told = next(group for group in state["groups"] if group["axis"] == "tp")
        assert (told["spans_nodes"], told["fabric"]) == (spans, "gloo" if spans else "shm")
    topology = state["topology"]
    assert (topology["num_nodes"], topology["ranks_per_node"], topology["link"]) == (2, 2, "200mbit")
    assert state["environment"]["fabric"] == "shm; gloo across 2 nodes (200mbit)"
    assert "2 of 2 ranks, link 200mbit" in server.run("status").stdout
    family = server.family()
    pid = server.process.pid
    assert len(of_owner(pid)) == 3
    server.end(signal.SIGKILL)
    wait_until(lambda: all_gone(family) and not of_owner(pid) and not shm_folders(pid), 5)


# ---- real nodes: here two namespaces, of which the server knows nothing


@pytest.fixture
def wiring() -> Iterator[Wiring]:
    made = Wiring(owned_name("test"), 2, 0, 0.0)
    make(made)
    yield made
    destroy(made.namespaces())


class NodeZero:
    """A server that runs on the first node, and requests to it from there: this process stands outside."""

    def __init__(self, wiring: Wiring, folder: Path) -> None:
        self.folder, self.prefix = folder, inside(wiring.node(0))
        (folder / "runtime").mkdir(mode=0o700)
        self.env = {**os.environ, "LABKIT_RUNTIME": str(folder / "runtime"), "LABKIT_HOME": str(folder)}
        command = [*self.prefix, sys.executable, "-m", "labkit.server", "serve", "--model", "lab-5m",
                   "--join-ranks", "4", "--memory-per-rank", "64MiB", "--device", "cpu", "--threads", "1",
                   "--control-host", wiring.address(0), "--control-port", "7001"]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=(folder / "log").open("wb"), env=self.env
        )
        assert self.process.stdout is not None
        self.first = json.loads(self.process.stdout.readline())

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        words = ["curl", "-s", "-H", f"Authorization: Bearer {self.first['token']}", self.first["url"] + path]
        if body is not None:
            words += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        return json.loads(subprocess.run([*self.prefix, *words], capture_output=True, check=True).stdout)

    def until_ready(self, timeout_s: float = 60.0) -> None:
        wait_until(lambda: (time.sleep(0.2), self.ask("/health")["status"] == "ready")[1], timeout_s)


def _torchrun(wiring: Wiring, index: int, server: NodeZero, *before: str) -> subprocess.Popen[bytes]:
    """The command of docs/nodes.md on one node."""
    command = [*inside(wiring.node(index)), *before, sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
               "--nproc-per-node=2", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=labkit",
               f"--rdzv-endpoint={wiring.address(0)}:29400", f"--local-addr={wiring.address(index)}",
               f"--rdzv-conf=is_host={index == 0}", "-m", "labkit.engine.worker"]  # fmt: skip
    env = {
        **os.environ,
        "LABKIT_CONTROL": f"tcp:{wiring.address(0)}:7001",
        "LABKIT_TOKEN_FILE": str(server.folder / "runtime" / "labkit" / "join-token"),
        "LABKIT_DEVICE": "cpu",
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }
    log = (server.folder / f"torchrun-{index}").open("wb")
    return subprocess.Popen(command, env=env, stdout=log, stderr=log)


def _complete(server: NodeZero) -> list[int]:
    return list(server.ask("/v1/completions", {"prompt": PROMPT, **GREEDY})["choices"][0]["token_ids"])


@pytest.mark.slow
def test_real_nodes_join_with_their_own_torchrun_come_back_and_are_let_go(wiring: Wiring, tmp_path: Path) -> None:
    """The second node's clock is an hour ahead, as another machine's may be."""
    server = NodeZero(wiring, tmp_path)
    ahead = ("unshare", "--time", "--monotonic=3600", "--boottime=3600", "--fork", "--kill-child")
    nodes = [_torchrun(wiring, 0, server), _torchrun(wiring, 1, server, *ahead)]
    try:
        server.until_ready()
        unsplit = _complete(server)
        server.ask("/lab/switch", {"layout": "dp2xtp2"})
        assert _complete(server) == unsplit and _complete(server) == unsplit, "a replica on each node"
        state = server.ask("/lab/state")
        assert state["topology"]["kind"] == "nodes that joined" and state["topology"]["num_nodes"] == 2
        assert state["clock"] == "minimum"
        (clock,) = state["clocks"]
        assert clock["ranks"] == [2, 3] and clock["num_round_trips"] >= 8
        assert abs(clock["offset_ns"] + 3600 * 10**9) <= clock["uncertainty_ns"] < 10**9, "it is an hour, exactly"
        server.ask("/lab/switch", {"layout": "tp4"})
        assert _complete(server) == unsplit
        server.ask("/lab/fault", {"rank": 3, "kind": "kill"})
        wait_until(lambda: server.ask("/lab/state")["state"] != "ready", 10)
        server.until_ready(90)
        assert _complete(server) == unsplit, "their torchruns started them again, and they joined again"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        assert [node.wait(20) for node in nodes] == [0, 0], "let go, not broken"
    finally:
        for process in (server.process, *nodes):
            process.kill()
            process.wait()
    assert "waiting for 4 ranks" in (tmp_path / "log").read_text()
