"""The torchrun process of one pool: how it is started, what it says, and how it is ended with all its ranks.

No port is a constant: torchrun's rendezvous picks a free one on loopback, so a hostname that does not
resolve and a second lab on the machine do no harm. It lives in a session of its own (Ctrl-C is the
owner's), and ends when the pipe to its stdin does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from labkit.cluster.launch import FORK
from labkit.paths import repo_dir

_TAIL_LINES = 30


_ALONE = ("--nnodes=1", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1")


@dataclass(frozen=True)
class Seat:
    """One torchrun of several on this machine, each in a network of its own."""

    index: int
    num_nodes: int
    prefix: tuple[str, ...]
    """Words before the command, which bring it into its network."""
    address: str
    endpoint: str
    """Where all of them meet: node 0's address and a port."""
    interface: str
    rendezvous_id: str

    def rendezvous(self) -> list[str]:
        return [
            f"--nnodes={self.num_nodes}", f"--node-rank={self.index}", f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-conf=is_host={self.index == 0}", f"--local-addr={self.address}",
        ]  # fmt: skip

    def environment(self, num_ranks: int) -> dict[str, str]:
        """NCCL shall take the nodes for different hosts; and each has its own share of this machine's GPUs."""
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = given.split(",") if given is not None else [str(i) for i in range(self.num_nodes * num_ranks)]
        mine = gpus[self.index * num_ranks : (self.index + 1) * num_ranks]
        return {"NCCL_HOSTID": f"{self.rendezvous_id}-{self.index}", "CUDA_VISIBLE_DEVICES": ",".join(mine)}


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that a torchrun and its ranks are told."""

    num_ranks: int
    """On this node."""
    threads: int
    device: str
    module: str
    folder: Path
    shm_folder: Path
    control: str
    token_file: Path
    seat: Seat | None = None
    """Where this torchrun stands among others; None: it is the only one."""

    def command(self) -> list[str]:
        return [
            *(self.seat.prefix if self.seat else ()),
            sys.executable, "-m", "labkit.cluster.launch", str(self.shm_folder),
            f"--nproc-per-node={self.num_ranks}", "--max-restarts=0", "--rdzv-backend=c10d",
            *(self.seat.rendezvous() if self.seat else _ALONE), f"--rdzv-id={self._rendezvous_id()}",
            f"--log-dir={self.folder / 'logs'}", "--redirects=3", *([FORK] if self.forks() else []),
            "-m", self.module,
        ]  # fmt: skip

    def forks(self) -> bool:
        """Whether torchrun forks its ranks (`labkit.engine.forking`) or starts each as a command."""
        return self.device == "cpu" and sys.platform == "linux"

    def _rendezvous_id(self) -> str:
        return self.seat.rendezvous_id if self.seat else secrets.token_hex(8)

    def environment(self) -> dict[str, str]:
        interface = self.seat.interface if self.seat else loopback_interface()
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(repo_dir()), os.environ.get("PYTHONPATH")))),
            "OMP_NUM_THREADS": str(self.threads),
            "GOMP_SPINCOUNT": "10000",  # some 30 us: long enough for the next small operation, short for a neighbour
            "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", _HUGE_PAGES),
            "GLOO_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": interface,
            "LABKIT_CONTROL": self.control,
            "LABKIT_TOKEN_FILE": str(self.token_file),
            "LABKIT_SHM": str(self.shm_folder),
            "LABKIT_DEVICE": self.device,
            **(self.seat.environment(self.num_ranks) if self.seat else {}),
        }


_HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""Weights and KV on huge pages, where the kernel gives them on request: a tenth to a quarter of a decode step."""


class Launcher:
    """One torchrun, from start to end.

    on_child(pid, rank or None, exit code) as soon as one of its processes has ended; on_end when it has
    itself.
    """

    def __init__(
        self, plan: LaunchPlan, on_child: Callable[[int, int | None, int], None], on_end: Callable[[], None]
    ) -> None:
        self._plan = plan
        self._on_child = on_child
        self._on_end = on_end
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.returncode

    @property
    def pid(self) -> int:
        return -1 if self._process is None else self._process.pid

    async def start(self) -> None:
        self._plan.folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        with open(self._plan.folder / "torchrun.log", "wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._plan.command(),
                env=self._plan.environment(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._watch = asyncio.create_task(self._read_reports(self._process))

    async def _read_reports(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self._note(line)
        await process.wait()
        self._on_end()

    def _note(self, line: bytes) -> None:
        """A report of `labkit.cluster.launch`; whatever else torchrun prints is not for us."""
        try:
            ended = json.loads(line)["ended"]
            self._on_child(ended["pid"], ended.get("rank"), ended["exit_code"])
        except (ValueError, KeyError, TypeError):
            return

    async def end(self, rank_pids: list[int], grace_s: float = 2.0) -> None:
        """End it and all its ranks: first by its stdin, after `grace_s` by SIGKILL."""
        process = self._process
        if process is None:
            return
        family = _alive([*rank_pids, *_children(process.pid)])
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), grace_s)
        except TimeoutError:
            process.kill()
            await process.wait()
        for relative in family:
            _kill(relative)
        await asyncio.to_thread(psutil.wait_procs, family, 2.0)
        if self._watch is not None:
            await self._watch

    def tail(self, rank: int) -> str:
        """The last lines that a rank wrote (its stderr), or torchrun's own when rank is -1."""
        if rank < 0:
            return _tail(self._plan.folder / "torchrun.log")
        logs = sorted(self._plan.folder.glob(f"logs/*/attempt_0/{rank}/stderr.log"))
        return _tail(logs[-1]) if logs else ""


def make_shm_folder(run_dir: Path) -> Path:
    """A private folder for this process's shared memory; what dead processes left behind is removed."""
    root = Path("/dev/shm")
    if not (root.is_dir() and os.access(root, os.W_OK)):
        root = run_dir
    prefix = f"labkit-{os.getuid()}-"
    for left in root.glob(f"{prefix}*"):
        owner = left.name.removeprefix(prefix).split("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=root))


def loopback_interface() -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address == "127.0.0.1" for a in addresses):
            return name
    return "lo"


def _tail(path: Path) -> str:
    try:
        with open(path, "rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - 16384))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-_TAIL_LINES:])


def _children(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _alive(pids: list[int]) -> list[psutil.Process]:
    """Handles that stay true to the process even if its number is used again."""
    found = []
    for pid in dict.fromkeys(pids):
        try:
            found.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    return found


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
