"""A lab server as its users start it: a process of its own, real ranks, a runtime folder of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from labkit.server.client import ServerClient


def wait_until(holds: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    give_up = time.monotonic() + timeout_s
    while not (result := holds()):
        assert time.monotonic() < give_up, "it did not come about"
        time.sleep(0.02)
    return result


class RealServer:
    def __init__(self, folder: Path, *options: str, **env: str) -> None:
        self.folder = folder
        for name in ("runtime", "home"):
            (folder / name).mkdir(mode=0o700, exist_ok=True)
        self.env = {
            **os.environ,
            "LABKIT_RUNTIME": str(folder / "runtime"),
            "LABKIT_HOME": str(folder / "home"),
            **env,
        }
        self.log = folder / "server.log"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "labkit.server", "serve", "--model", "lab-5m", *options],
            stdout=subprocess.PIPE,
            stderr=self.log.open("wb"),
            env=self.env,
        )
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline()
        assert self.first_line, self.log.read_text()
        self.client = ServerClient(**json.loads(self.first_line))

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """One of the server's shell commands, in the same runtime folder."""
        command = [sys.executable, "-m", "labkit.server", *words]
        return subprocess.run(command, capture_output=True, text=True, env=self.env, timeout=60)

    def family(self) -> list[psutil.Process]:
        """Everything that the server has started, and what that has started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)
