"""A Voila server of a test's own, with the project's settings and template, on a port that was free."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
DASHBOARDS = ROOT / "dashboards"


class VoilaServer:
    """Shows `notebook`, or the notebooks of a folder, as `labkit lab` would; `environment` overrides."""

    def __init__(self, notebook: Path, log: Path, **environment: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._sink = log.open("wb")
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, "-m", "voila", str(notebook), "--no-browser", f"--port={self.port}"],
            env={**os.environ, **self._places(), **environment},
            cwd=notebook if notebook.is_dir() else notebook.parent,
            stdout=self._sink,
            stderr=subprocess.STDOUT,
        )
        self._wait()

    @staticmethod
    def _places() -> dict[str, str]:
        return {
            "JUPYTER_PATH": str(DASHBOARDS / "share" / "jupyter"),
            "JUPYTER_CONFIG_PATH": str(DASHBOARDS / "config"),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}",
        }

    def _wait(self, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.1)
        raise RuntimeError(f"Voila did not start:\n{self.log.read_text()[-2000:]}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def page(self, notebook: str) -> str:
        """Address of one of a folder's notebooks."""
        return f"{self.url}voila/render/{notebook}"

    def get(self, path: str = "") -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=60) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def kernels(self) -> list[psutil.Process]:
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it may be gone by now
                if "ipykernel_launcher" in " ".join(child.cmdline()):
                    found.append(child)
        return found

    def wait_for_kernels(self, num: int, timeout_s: float) -> float:
        """Seconds until there are exactly so many."""
        begin = time.monotonic()
        while len(self.kernels()) != num:
            assert time.monotonic() - begin < timeout_s, f"{len(self.kernels())} kernels, not {num}"
            time.sleep(0.1)
        return time.monotonic() - begin

    def stop(self) -> None:
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self._sink.close()


def write_notebook(path: Path, *lines: str) -> Path:
    """A notebook of one cell."""
    cell = {"cell_type": "code", "id": "cell", "metadata": {}, "execution_count": None, "outputs": []}
    cell["source"] = "\n".join(lines)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}, "title": "Layouts"}
    path.write_text(json.dumps({"cells": [cell], "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}))
    return path
