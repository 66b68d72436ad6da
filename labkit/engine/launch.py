"""What a rank is told by its environment, and how it hangs on its owner.

The pool's own torchrun sets everything. On real nodes somebody else's torchrun starts the rank: then the owner's
address and the file with its secret are all that is given, the rank waits for the owner to listen, and its exit
status tells torchrun whether to start it again (the owner broke) or not (the owner said goodbye).
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from labkit.engine import messages
from labkit.engine.channel import Channel, dial, wait_for_end
from labkit.engine.clock import clock_id
from labkit.engine.messages import Hello

_PATIENCE_S = 60.0
"""How long a rank on a real node waits for the engine to listen."""


@dataclass(frozen=True)
class Launch:
    """torchrun's part, and the pool's."""

    rank: int
    local_rank: int
    device: str
    control: str
    token: str
    shm_folder: Path
    node: int = 0
    joins: bool = False
    """Started by somebody else's torchrun."""

    @classmethod
    def read(cls, environ: dict[str, str]) -> Launch:
        missing = [
            name for name in ("RANK", "LOCAL_RANK", "LABKIT_CONTROL", "LABKIT_TOKEN_FILE") if name not in environ
        ]
        if missing:
            raise SystemExit(
                f"labkit.engine.worker is a rank: torchrun and labkit's pool start it, and {', '.join(missing)} "
                f"would be set. Start it with `labkit serve`, or on real nodes as docs/nodes.md says."
            )
        return cls(
            rank=int(environ["RANK"]),
            local_rank=int(environ["LOCAL_RANK"]),
            device=environ.get("LABKIT_DEVICE") or _default_device(),
            control=environ["LABKIT_CONTROL"],
            token=Path(environ["LABKIT_TOKEN_FILE"]).read_text().strip(),
            shm_folder=Path(environ["LABKIT_SHM"]) if "LABKIT_SHM" in environ else _own_shm_folder(environ),
            node=int(environ.get("GROUP_RANK", "0")),
            joins="LABKIT_SHM" not in environ,
        )

    def torch_device(self) -> torch.device:
        if self.device != "cuda":
            return torch.device("cpu")
        num_gpus = torch.cuda.device_count()
        if self.local_rank >= num_gpus:
            raise SystemExit(
                f"rank {self.rank} has no GPU of its own: this machine has {num_gpus}, and NCCL refuses two "
                f"ranks on one. Start at most {num_gpus} ranks, or run them on the CPU with --device cpu."
            )
        device = torch.device("cuda", self.local_rank)
        torch.cuda.set_device(device)
        return device

    def dial(self) -> socket.socket:
        """A connection to the engine; on a real node it may come up later than we do."""
        give_up = time.monotonic() + (_PATIENCE_S if self.joins else 0.0)
        while True:
            try:
                return dial(self.control)
            except (ConnectionError, TimeoutError, FileNotFoundError):
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.25)

    def hello(self, lifeline: bool) -> Hello:
        name = "cpu" if self.device == "cpu" else f"cuda:{self.local_rank} {torch.cuda.get_device_name()}"
        return Hello(
            token=self.token,
            rank=self.rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            lifeline=lifeline,
            device=name,
            versions={"python": platform.python_version(), "torch": str(torch.__version__)},
            clock_ns=time.monotonic_ns(),
            node=self.node,
            clock=clock_id(),
        )

    def watch_owner(self) -> None:
        """From now on this process ends when its owner does."""
        lifeline = self.dial()
        Channel(lifeline).send(messages.encode(self.hello(lifeline=True)))
        threading.Thread(target=self._outlive_not, args=(lifeline,), name="lifeline", daemon=True).start()

    def _outlive_not(self, lifeline: socket.socket) -> None:
        said_goodbye = wait_for_end(lifeline)
        shutil.rmtree(self.shm_folder, ignore_errors=True)
        os._exit(1 if self.joins and not said_goodbye else 0)


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _own_shm_folder(environ: dict[str, str]) -> Path:
    """The same for the ranks of one node and one start, and named after their torchrun.

    Whoever starts a pool there later can see that it is dead.
    """
    root = Path("/dev/shm")
    root = root if root.is_dir() and os.access(root, os.W_OK) else Path(tempfile.gettempdir())
    start = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    folder = root / f"labkit-{os.getuid()}-{os.getppid()}-join{start}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise SystemExit(f"{folder} belongs to somebody else; remove it, it is where this node's ranks share memory.")
    return folder
