"""Nodes on one machine: how many, how many ranks each, and the link between them.

A node is a network namespace; each has one interface to a switch, and the interface's rate is the link. What goes
through it is only what the ranks send each other across nodes, and torchrun's rendezvous: the engine's sockets are
unix ones and pass it by. This file is the value and the handle; `labkit.cluster.namespaces` does the work, in a process
of its own that outlives a killed owner by as long as it takes to remove everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import sys
from dataclasses import asdict, dataclass
from typing import Any

from labkit.cluster.namespaces import Wiring, destroy, owned_name
from labkit.paths import repo_dir

MAX_NODES = 16
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)", re.IGNORECASE)
_READY_S = 30.0
_WAYS_OUT = (
    "join real nodes instead (--join-ranks, see docs/nodes.md), or have the slow path without nodes: --fabric gloo, "
    "which is TCP over loopback"
)


class NodesUnavailable(ValueError):
    """This machine cannot make nodes; the sentence says what it lacks and what else can be done."""


@dataclass(frozen=True)
class Link:
    """Each node's connection to the others, both ways. rate 0: as fast as the machine can."""

    rate_bits_per_s: int = 0
    delay_ms: float = 0.0
    """Added to every packet on its way out of a node."""

    @classmethod
    def parse(cls, text: str, delay_ms: float = 0.0) -> Link:
        """`200mbit`, `1gbit`, `500kbit`; empty is unshaped. ValueError with a sentence."""
        if not 0 <= delay_ms < 10_000:
            raise ValueError(f"--link-delay-ms is {delay_ms:g}; it is a number of milliseconds from 0 to 10000.")
        if not text.strip():
            return cls(0, delay_ms)
        match = _RATE.fullmatch(text.strip())
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ValueError(
                f"--link is {text!r}; it is a rate in bits such as 200mbit, 1gbit or 500kbit "
                f"(not mbps, which tc reads as megabytes)."
            )
        rate = round(float(match[1]) * unit)
        if not 10**5 <= rate <= 10**11:
            raise ValueError(f"--link is {text!r}; rates from 100kbit to 100gbit can be had.")
        return cls(rate, delay_ms)

    def __str__(self) -> str:
        rate = _rate_text(self.rate_bits_per_s) if self.rate_bits_per_s else "unshaped"
        return f"{rate}, {self.delay_ms:g} ms" if self.delay_ms else rate


def _rate_text(bits_per_s: int) -> str:
    for unit, size in reversed(_UNITS.items()):
        if bits_per_s >= size:
            return f"{bits_per_s / size:g}{unit}"
    return f"{bits_per_s}bit"


@dataclass(frozen=True)
class Nodes:
    """Ranks 0..ranks_per_node-1 stand on node 0, the next ones on node 1, and so on."""

    num_nodes: int
    ranks_per_node: int
    link: Link = Link()

    def __post_init__(self) -> None:
        if not 2 <= self.num_nodes <= MAX_NODES or self.ranks_per_node < 1:
            raise ValueError(
                f"{self.num_nodes} nodes of {self.ranks_per_node} ranks cannot be made on one machine: "
                f"--nodes takes 2 to {MAX_NODES}, --ranks-per-node 1 or more."
            )

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node


def why_not() -> str:
    """Why this machine cannot make nodes, and what else can be done; empty when it can."""
    if sys.platform != "linux":
        lack = f"--nodes makes Linux network namespaces, and this is {sys.platform}"
    elif os.geteuid() != 0:
        lack = "--nodes makes network namespaces, which needs root: start it with sudo"
    elif missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        lack = f"--nodes needs iproute2, and {' and '.join(missing)} cannot be found: install it (apt install iproute2)"
    else:
        return ""
    return f"{lack}; or {_WAYS_OUT}."


class NodeKeeper:
    """The nodes of one start of a pool: made by `start`, gone after `end` or when this process is."""

    def __init__(self, nodes: Nodes) -> None:
        name = owned_name(secrets.token_hex(3))
        self.wiring = Wiring(name, nodes.num_nodes, nodes.link.rate_bits_per_s, nodes.link.delay_ms)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Raises NodesUnavailable."""
        if reason := why_not():
            raise NodesUnavailable(reason)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "labkit.cluster.namespaces", json.dumps(asdict(self.wiring)),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(repo_dir()), os.environ.get("PYTHONPATH", "")])},
        )  # fmt: skip
        answer = await self._answer(self._process)
        if "ready" not in answer:
            await self.end()
            raise NodesUnavailable(f"the nodes could not be made: {answer.get('error', 'no answer')}; or {_WAYS_OUT}.")

    @staticmethod
    async def _answer(process: asyncio.subprocess.Process) -> dict[str, Any]:
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), _READY_S)
            return json.loads(line)
        except (TimeoutError, ValueError):
            return {}

    async def end(self) -> None:
        """Remove the namespaces and whatever still runs in them; should the keeper be gone, do it from here."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 5.0)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        await asyncio.to_thread(destroy, self.wiring.namespaces())
