"""A pool with an event loop of its own, so that a plain test can drive it and a module can share it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from labkit.cluster.nodes import Nodes
from labkit.cluster.pool import Pool, PoolConfig, PoolFailure
from labkit.cluster.starters import Join
from labkit.engine.messages import AllocateKV, Configure, EngineMessage, RankMessage, SampleSpec, Step
from labkit.engine.places import nodes_of

ECHO = "tests.cluster.echo_worker"


def int32(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def step_message(epoch: int, step_id: int, token: int) -> Step:
    return Step(epoch, step_id, int32(token), int32(1), int32(0), int32(0), [SampleSpec(0)], 1)


def configure_message(epoch: int, layout: str, fabric: str = "shm", model: str = "") -> Configure:
    return Configure(epoch, layout, model, 0, "float32", 256 << 20, 16, 512, 64, 1, fabric, True, False)


class Harness:
    def __init__(self, run_dir: Path, num_ranks: int = 2, module: str = ECHO, start_timeout_s: float = 120.0,
                 nodes: Nodes | None = None, join: Join | None = None) -> None:  # fmt: skip
        self.loop = asyncio.new_event_loop()
        self.inbox: asyncio.Queue[tuple[int, RankMessage]] = asyncio.Queue()
        self.failures: asyncio.Queue[PoolFailure] = asyncio.Queue()
        self.states: list[str] = []
        config = PoolConfig(num_ranks, 1, "cpu", "gloo", run_dir, start_timeout_s, module, nodes, join)
        self.pool = Pool(
            config,
            lambda rank, message: self.inbox.put_nowait((rank, message)),
            self.failures.put_nowait,
            self.states.append,
        )

    def do(self, work: Coroutine[Any, Any, Any], timeout_s: float = 120.0) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, timeout_s))

    def start(self) -> None:
        self.do(self.pool.start())

    def ask(self, message: EngineMessage, num_answers: int) -> list[tuple[int, Any]]:
        """Send to all ranks, and take that many answers."""
        self.pool.send_many(range(self.pool.config.num_ranks), message)
        return [self.do(self.inbox.get(), 30.0) for _ in range(num_answers)]

    def configure(self, epoch: int, layout: str, fabric: str = "shm") -> None:
        num_ranks = self.pool.config.num_ranks
        message = configure_message(epoch, layout, fabric)
        message.nodes = nodes_of(self.pool.hellos)
        self.ask(message, num_ranks)
        self.ask(AllocateKV(epoch, 8), num_ranks)

    def failure(self, timeout_s: float = 5.0) -> PoolFailure:
        return self.do(self.failures.get(), timeout_s)

    def rest(self, seconds: float) -> None:
        self.do(asyncio.sleep(seconds))

    def close(self) -> None:
        self.do(self.pool.stop())
        self.loop.close()


def still_alive(pids: list[int]) -> list[int]:
    alive = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                alive.append(pid)
        except psutil.NoSuchProcess:
            continue
    return alive


def family(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def shm_folders(pid: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"labkit-*-{pid}-*"))
