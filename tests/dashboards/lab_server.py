"""A lab server that pages look at: real ranks, in a runtime folder that the pages look into."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any


class LabServer:
    """`labkit serve` with its ranks; not started until `start`."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        command = [sys.executable, "-m", "labkit.cli", "serve", "--model", "lab-5m", "--ranks", "2"]
        with self._log.open("wb") as sink:
            self.process = subprocess.Popen(
                [*command, "--memory-per-rank", "256MiB"], stdout=subprocess.PIPE, stderr=sink
            )
        assert self.process.stdout is not None
        self.door = json.loads(self.process.stdout.readline())

    def post(self, path: str, **body: Any) -> None:
        headers = {"Authorization": f"Bearer {self.door['token']}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.door["url"] + path, json.dumps(body).encode(), headers)
        urllib.request.urlopen(request, timeout=30).close()

    def stop(self) -> None:
        if self.is_running:
            assert self.process is not None
            self.process.terminate()
            self.process.wait(30)
