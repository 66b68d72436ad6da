"""Where a pool's ranks come from: one torchrun here, one in each of several nodes made here, or somebody else's.

All of them look alike to the crew: `start`, an exit code when a torchrun has ended, the end of a rank's log, `end`.
What a crew cannot know of ranks that join (their exit codes and logs) is left out, not made up.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from labkit.cluster.launcher import Launcher, LaunchPlan, Seat
from labkit.cluster.namespaces import INTERFACE, inside
from labkit.cluster.nodes import NodeKeeper, Nodes

OnChild = Callable[[int, int | None, int], None]


class Starter(Protocol):
    @property
    def exit_code(self) -> int | None:
        """Of the first torchrun that has ended; None while all live, or where they are not ours."""
        ...

    async def start(self) -> None: ...

    def tail(self, rank: int) -> str:
        """The end of a rank's log, or torchrun's own when rank is -1; empty where it is not here."""
        ...

    async def end(self, rank_pids: list[int]) -> None: ...


class OneNode:
    """The ranks of this machine under one torchrun."""

    def __init__(self, plan: LaunchPlan, on_child: OnChild, on_end: Callable[[], None]) -> None:
        self._launcher = Launcher(plan, on_child, on_end)

    @property
    def exit_code(self) -> int | None:
        return self._launcher.exit_code

    async def start(self) -> None:
        await self._launcher.start()

    def tail(self, rank: int) -> str:
        return self._launcher.tail(rank)

    async def end(self, rank_pids: list[int]) -> None:
        await self._launcher.end(rank_pids)


class SeveralNodes:
    """Nodes made on this machine, a torchrun in each; they meet on node 0."""

    def __init__(self, nodes: Nodes, plan: LaunchPlan, on_child: OnChild, on_end: Callable[[], None]) -> None:
        self._nodes, self._plan, self._on_child, self._on_end = nodes, plan, on_child, on_end
        self._keeper = NodeKeeper(nodes)
        self._launchers: list[Launcher] = []

    @property
    def exit_code(self) -> int | None:
        return next((one.exit_code for one in self._launchers if one.exit_code is not None), None)

    async def start(self) -> None:
        await self._keeper.start()
        port = 20000 + secrets.randbelow(20000)  # of a network that is empty
        meeting = f"{self._keeper.wiring.address(0)}:{port}"
        name = secrets.token_hex(8)
        for index in range(self._nodes.num_nodes):
            plan = self._plan_of(index, meeting, name)
            self._launchers.append(Launcher(plan, self._on_child, self._on_end))
        await asyncio.gather(*[launcher.start() for launcher in self._launchers])

    def _plan_of(self, index: int, meeting: str, name: str) -> LaunchPlan:
        wiring, nodes = self._keeper.wiring, self._nodes
        seat = Seat(index, nodes.num_nodes, inside(wiring.node(index)), wiring.address(index), meeting, INTERFACE, name)
        folder = self._plan.folder / f"node-{index}"
        return replace(self._plan, num_ranks=nodes.ranks_per_node, folder=folder, seat=seat)

    def tail(self, rank: int) -> str:
        if rank < 0:
            return "\n".join(filter(None, (launcher.tail(-1) for launcher in self._launchers)))
        node, local = divmod(rank, self._nodes.ranks_per_node)
        return self._launchers[node].tail(local) if node < len(self._launchers) else ""

    async def end(self, rank_pids: list[int]) -> None:
        await asyncio.gather(*[launcher.end(rank_pids) for launcher in self._launchers])
        await self._keeper.end()


@dataclass(frozen=True)
class Join:
    """Ranks that somebody else's torchrun starts dial this address, with the secret that the file holds."""

    host: str
    port: int
    token_file: Path

    def token(self) -> str:
        """What the file holds; a new secret, and the file (0600), where there is none."""
        with contextlib.suppress(FileNotFoundError):
            if token := self.token_file.read_text().strip():
                return token
        token = secrets.token_hex(32)
        self.token_file.parent.mkdir(parents=True, exist_ok=True)
        self.token_file.touch(mode=0o600)
        self.token_file.chmod(0o600)
        self.token_file.write_text(token)
        return token


class Joined:
    """Ranks that come by themselves: nothing to start here, and nothing to end but their connections."""

    exit_code: int | None = None

    async def start(self) -> None:
        return None

    def tail(self, rank: int) -> str:
        return ""

    async def end(self, rank_pids: list[int]) -> None:
        return None
