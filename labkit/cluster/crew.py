"""The ranks of one start of a pool: torchrun, two sockets to each rank, and what is known when they break.

A crew is complete when every rank has said Hello on both. The first sign of trouble after that (last words,
a connection that ends, torchrun that ends) starts a short wait for the other signs; then the rank that went
first is named, once. A crew ends as a whole and leaves nothing but, if asked, its logs.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from labkit.cluster.blame import Evidence, PoolFailure, who_went_first
from labkit.cluster.launcher import LaunchPlan, make_shm_folder
from labkit.cluster.link import RankLink, frame, listen
from labkit.cluster.nodes import Nodes, NodesUnavailable
from labkit.cluster.starters import Join, Joined, OneNode, SeveralNodes, Starter
from labkit.engine.clock import Clocks
from labkit.engine.messages import Failed, Hello, Ping, Pong, RankMessage

_SETTLE_S = 2.5
"""How long the exit code of a rank is waited for when its connection has ended. It takes milliseconds, but
on macOS, where torchrun ends all other ranks before it tells."""


class PoolError(RuntimeError):
    """The ranks could not be started; the message says which and shows the end of their log."""


@dataclass(frozen=True)
class PoolConfig:
    num_ranks: int
    threads: int
    """Threads of each rank, the same whatever the layout."""
    device: str
    """cpu or cuda."""
    backend: str
    """gloo or nccl."""
    run_dir: Path
    """A private folder of this pool: sockets, the secret and the ranks' logs lie in it."""
    start_timeout_s: float = 180.0
    module: str = "labkit.engine.worker"
    """What torchrun runs as each rank."""
    nodes: Nodes | None = None
    """Nodes to be made on this machine; None: all ranks stand on one."""
    join: Join | None = None
    """Where ranks started elsewhere join; None: they are started here."""

    def __post_init__(self) -> None:
        if self.nodes is not None and self.nodes.num_ranks != self.num_ranks:
            raise ValueError(
                f"{self.nodes.num_nodes} nodes of {self.nodes.ranks_per_node} ranks are "
                f"{self.nodes.num_ranks} ranks, not {self.num_ranks}"
            )
        if self.num_ranks < 1 or self.threads < 1:
            raise ValueError(
                f"a pool has at least one rank with one thread, not {self.num_ranks} ranks with {self.threads}"
            )
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"ranks run on cpu or cuda, not {self.device!r}")


class Crew:
    """The ranks of one start: their launcher, their links, and what is known when they break."""

    def __init__(self, config: PoolConfig, folder: Path, on_joined: Callable[[Hello], None],
                 on_message: Callable[[int, RankMessage], None]) -> None:  # fmt: skip
        self.on_broken: Callable[[PoolFailure], None] = lambda failure: None
        self.links: dict[int, RankLink] = {}
        self._lifelines: dict[int, RankLink] = {}
        self._rank_of: dict[int, int] = {}
        """By process id."""
        self._config, self._folder = config, folder
        self._on_joined, self._on_message = on_joined, on_message
        self._evidence = Evidence()
        self._trouble = asyncio.Event()
        self._complete = asyncio.Event()
        self._news = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._ended = False
        self._server: asyncio.Server | None = None
        self._starter: Starter | None = None
        self._shm_folder: Path | None = None
        self.clocks = Clocks()

    async def start(self) -> None:
        self._folder.mkdir(parents=True, mode=0o700)
        try:
            self._starter = await (self._invite() if self._config.join else self._prepare())
            await self._starter.start()
        except (NodesUnavailable, OSError) as error:
            raise PoolError(str(error)) from error
        await self._wait_complete()
        self._watch = asyncio.create_task(self._report_trouble())

    async def _invite(self) -> Starter:
        join = self._config.join
        assert join is not None
        self._server, _ = await listen((), join.token(), self, (join.host, join.port))
        self._evidence.knows_exits = False
        return Joined()

    async def _prepare(self) -> Starter:
        token = secrets.token_hex(32)
        token_file = self._folder / "token"
        token_file.touch(mode=0o600)
        token_file.write_text(token)
        self._shm_folder = make_shm_folder(self._folder)
        self._server, control = await listen((self._folder, self._shm_folder), token, self)
        config = self._config
        plan = LaunchPlan(config.num_ranks, config.threads, config.device, config.module, self._folder,
                          self._shm_folder, control, token_file)  # fmt: skip
        if config.nodes is not None:
            return SeveralNodes(config.nodes, plan, self._child_ended, self._launcher_ended)
        return OneNode(plan, self._child_ended, self._launcher_ended)

    async def _wait_complete(self) -> None:
        """Every rank's two connections, or PoolError."""
        waits = [asyncio.create_task(event.wait()) for event in (self._complete, self._trouble)]
        try:
            patience_s = self._config.start_timeout_s if self._config.join is None else None
            await asyncio.wait(waits, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._ended:
            raise PoolError("the pool was stopped before its ranks were ready")
        if self._trouble.is_set():
            failure = await self._settle()
            raise PoolError(f"{failure.error}, before all ranks were ready.\n{failure.traceback}".rstrip())
        if not self._complete.is_set():
            raise PoolError(self._who_is_missing())

    def _who_is_missing(self) -> str:
        missing = [rank for rank in range(self._config.num_ranks) if rank not in self._lifelines]
        assert self._starter is not None
        return (
            f"{len(missing)} of {self._config.num_ranks} ranks did not report within "
            f"{self._config.start_timeout_s:g} s (ranks {', '.join(map(str, missing))}). The end of rank "
            f"{missing[0]}'s log:\n{self._starter.tail(missing[0]) or self._starter.tail(-1) or '(empty)'}"
        )

    # ---- Listener: what the links tell

    def joined(self, link: RankLink, hello: Hello) -> None:
        links = self._lifelines if hello.lifeline else self.links
        if hello.rank in links or not 0 <= hello.rank < self._config.num_ranks:
            link.rank = -1
            link.close()
            return
        links[hello.rank] = link
        if not hello.lifeline:
            self._rank_of[hello.pid] = hello.rank
            if self.clocks.joined(hello, time.monotonic_ns()):
                self._ping(hello.rank)
            self._on_joined(hello)
        if len(self.links) == len(self._lifelines) == self._config.num_ranks:
            self._complete.set()

    def received(self, rank: int, message: RankMessage) -> None:
        if isinstance(message, Failed):
            self._evidence.last_words.append(message)
            self._noticed()
        elif isinstance(message, Pong):
            wait_s = self.clocks.pong(rank, message, time.monotonic_ns())
            asyncio.get_running_loop().call_later(wait_s, self._ping, rank)
        elif not self._trouble.is_set():
            self.clocks.translate(rank, message)
            self._on_message(rank, message)

    def _ping(self, rank: int) -> None:
        """Ask for the time on the rank's host; its answer sets off the next."""
        if not self._trouble.is_set():
            self.links[rank].write(frame(Ping(time.monotonic_ns())))

    def lost(self, link: RankLink) -> None:
        if self._ended:
            return
        if not link.lifeline:
            self._evidence.heard_out.add(link.rank)
        if link.rank not in self._evidence.lost:
            self._evidence.lost.append(link.rank)
        self._noticed()

    def _child_ended(self, pid: int, rank: int | None, exit_code: int) -> None:
        """torchrun says so; a process that is no rank (yet) has no part in this."""
        if rank is None:
            rank = self._rank_of.get(pid)
        if not self._ended and rank is not None:
            self._evidence.exits.setdefault(rank, exit_code)
            self._noticed()

    def _launcher_ended(self) -> None:
        if not self._ended and self._starter is not None:
            self._evidence.launcher_exit = self._starter.exit_code
            self._noticed()

    def _noticed(self) -> None:
        self._trouble.set()
        self._news.set()

    # ---- when it breaks

    async def _report_trouble(self) -> None:
        await self._trouble.wait()
        failure = await self._settle()
        asyncio.get_running_loop().call_soon(self.on_broken, failure)  # an error in it is logged, not lost

    async def _settle(self) -> PoolFailure:
        """Wait until it is clear who went first, for at most _SETTLE_S."""
        give_up = time.monotonic() + _SETTLE_S
        while not self._evidence.is_conclusive() and (left_s := give_up - time.monotonic()) > 0:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), left_s)
            except TimeoutError:
                break
        return self.with_log(who_went_first(self._evidence))

    def with_log(self, failure: PoolFailure) -> PoolFailure:
        """With the end of the rank's log where it left no traceback."""
        if failure.traceback or self._starter is None:
            return failure
        return replace(failure, traceback=self._starter.tail(failure.rank))

    async def end(self, keep_logs: bool) -> None:
        """Close the lifelines, so that the ranks leave.

        End torchrun; remove everything but (maybe) the logs.
        """
        self._ended = True
        self._trouble.set()
        if self._watch is not None and self._watch is not asyncio.current_task():
            self._watch.cancel()
        if not keep_logs:
            for link in self._lifelines.values():
                link.say_goodbye()
        for link in (*self.links.values(), *self._lifelines.values()):
            link.close()
        if self._starter is not None:
            await self._starter.end([*self._rank_of])
        if self._server is not None:
            self._server.close()
        if self._shm_folder is not None:
            shutil.rmtree(self._shm_folder, ignore_errors=True)
        for name in ("control.sock", "token"):
            (self._folder / name).unlink(missing_ok=True)
        if not keep_logs:
            shutil.rmtree(self._folder, ignore_errors=True)
