"""Warm ranks: torchrun starts them once, and they stay until the pool stops, fails or restarts.

The pool owns their processes and sockets and knows nothing of models: it carries messages, notices who went
first when something breaks, ends the rest within seconds and says so once. Its states are starting, ready,
failed, restarting and stopped. It restarts at most three times in ten minutes; then it says why not.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import psutil

from labkit.cluster.blame import PoolFailure, hung
from labkit.cluster.crew import Crew, PoolConfig, PoolError
from labkit.cluster.link import frame
from labkit.engine.messages import EngineMessage, Hello, RankMessage
from labkit.measure.records import ClockRecord

__all__ = ["Pool", "PoolConfig", "PoolError", "PoolFailure", "RestartsExhausted", "default_run_dir"]

MAX_RESTARTS = 3
RESTART_WINDOW_S = 600.0


class RestartsExhausted(PoolError):
    """The pool broke too often; the message says how it broke the last time."""


class Pool:
    """The callbacks are called on the event loop's thread and must not block.

    on_message(rank, message): whatever a rank says after its Hello. on_failure(failure): once for each time
    the pool breaks after it was ready. on_state(state): at each change, and at each rank that joins (see
    `progress`).
    """

    def __init__(self, config: PoolConfig, on_message: Callable[[int, RankMessage], None],
                 on_failure: Callable[[PoolFailure], None], on_state: Callable[[str], None]) -> None:  # fmt: skip
        self.config = config
        self.state = "stopped"
        self.hellos: dict[int, Hello] = {}
        self.failure: PoolFailure | None = None
        """Of the last time it broke."""
        self._on_message, self._on_failure, self._on_state = on_message, on_failure, on_state
        self._restarts: list[float] = []
        self._num_starts = 0
        self._crew: Crew | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def pids(self) -> dict[int, int]:
        return {rank: hello.pid for rank, hello in self.hellos.items()}

    @property
    def clocks(self) -> list[ClockRecord]:
        """Of hosts other than this one."""
        return [] if self._crew is None else self._crew.clocks.describe()

    @property
    def progress(self) -> str:
        return f"{len(self.hellos)} of {self.config.num_ranks} ranks are there"

    @property
    def restarts_left(self) -> int:
        since = time.monotonic() - RESTART_WINDOW_S
        return MAX_RESTARTS - sum(at > since for at in self._restarts)

    async def start(self) -> None:
        """Start the ranks and wait for all of them. PoolError when they do not come."""
        if self._crew is not None:
            raise PoolError(f"this pool has been started and is {self.state}; stop it, or restart it when it failed")
        self._enter("starting")
        await self._assemble()

    async def restart(self) -> None:
        """Start again after a failure. RestartsExhausted after three times in ten minutes."""
        await self._finish_ending()
        if self.restarts_left <= 0:
            why = f" The last time: {self.failure.error}." if self.failure else ""
            raise RestartsExhausted(
                f"the ranks broke {MAX_RESTARTS} times within {RESTART_WINDOW_S / 60:.0f} minutes after a restart, "
                f"so they are not started again.{why} Mend the cause, then start the server anew."
            )
        self._restarts.append(time.monotonic())
        self._enter("restarting")
        await self._disband()
        await self._assemble()

    async def stop(self) -> None:
        """End the ranks and remove what they had: no process, socket or shared memory stays."""
        self._enter("stopped")
        await self._finish_ending()
        await self._disband()

    def send(self, rank: int, message: EngineMessage) -> None:
        """Without waiting. To a pool that is not ready it is dropped.

        `on_failure` has said, or will say, why.
        """
        self.send_many((rank,), message)

    def send_many(self, ranks: Iterable[int], message: EngineMessage) -> None:
        """The same message to several ranks, encoded once."""
        if self._crew is not None and self.state == "ready":
            data = frame(message)
            self._crew.clocks.sent(ranks, message, time.monotonic_ns())
            for rank in ranks:
                self._crew.links[rank].write(data)

    def declare_hung(self, ranks: Sequence[int], what: str, timeout_s: float) -> None:
        """Whoever waits for these ranks' answers has given up: the pool fails as if the first had ended."""
        if self._crew is not None and self.state == "ready":
            self._broke(self._crew.with_log(hung(ranks, what, timeout_s)))

    # ---- what the crew tells

    def _joined(self, hello: Hello) -> None:
        self.hellos[hello.rank] = hello
        self._on_state(self.state)

    def _broke(self, failure: PoolFailure) -> None:
        """The crew of a ready pool has failed: say so first, then end what is left of it."""
        self.failure = failure
        self._enter("failed")
        self._ending = asyncio.create_task(self._disband(keep_logs=True))
        self._on_failure(failure)

    # ---- crews come and go

    def _enter(self, state: str) -> None:
        self.state = state
        self._on_state(state)

    async def _assemble(self) -> None:
        self._num_starts += 1
        self.hellos = {}
        folder = self.config.run_dir / f"start-{self._num_starts}"
        crew = self._crew = Crew(self.config, folder, self._joined, self._on_message)
        try:
            await crew.start()
        except BaseException as error:
            await self._disband(keep_logs=True)
            if self.state != "stopped":
                self._enter("failed")
            if isinstance(error, PoolError):
                self.failure = PoolFailure(-1, "exited", str(error))
            raise
        crew.on_broken = self._broke
        self._enter("ready")

    async def _disband(self, keep_logs: bool = False) -> None:
        crew, self._crew = self._crew, None
        if crew is not None:
            await crew.end(keep_logs)

    async def _finish_ending(self) -> None:
        if self._ending is not None:
            await self._ending
            self._ending = None


def default_run_dir(base: Path) -> Path:
    """A new private folder for one pool under `base`; what owners that were killed left there is removed."""
    for left in base.glob("pool-*-*"):
        owner = left.name.split("-")[1]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(left, ignore_errors=True)
    return base / f"pool-{os.getpid()}-{secrets.token_hex(4)}"
