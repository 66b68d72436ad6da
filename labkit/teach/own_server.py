"""A lab server of a lesson's own, for a model that the lab server does not serve.

The lab server belongs to everybody who is at it, so a lesson with another model neither ends nor changes it: it
starts one beside it, in a runtime folder of its own, where nobody else finds it. That one ends with the kernel; should
the kernel be killed, it ends by itself soon after, for nobody is at it any more.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit.lab import Lab, connect
from labkit.paths import runtime_dir
from labkit.server.client import EventStream, ServerClient, ServerError
from labkit.server.discovery import ServesOther, find, start_detached

_LINGER_S, _END_S = 30.0, 15.0


def lab_for(serve: Mapping[str, Any]) -> tuple[Lab, str]:
    """The lab server, found or started, and ""; or one of the kernel's own, and what the lab server serves.

    Raises ServerError when none can be had.
    """
    try:
        return connect(**serve), ""
    except ServesOther:
        found = find()
        return Lab(_own_client(serve)), found.model if found else "another model"


class _Own:
    """One server that is there as long as this object is: an open event stream keeps it from leaving."""

    def __init__(self, serve: Mapping[str, Any]) -> None:
        _sweep()
        self._folder = Path(tempfile.mkdtemp(prefix=f"own-{os.getpid()}-", dir=runtime_dir()))
        env = {"LABKIT_RUNTIME": str(self._folder), "LABKIT_LINGER_S": str(_LINGER_S)}
        try:
            found = start_detached(serve, env, self._folder / "server.log")
            self.client: ServerClient = found.client()
            self._stream: EventStream = self.client.events(lambda event: None, ["lease"])
        except ServerError:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        atexit.register(self.end)

    def answers(self) -> bool:
        try:
            return self.client.health() != "failed"
        except ServerError:
            return False

    def end(self) -> None:
        """Returns when it is gone, and its folder with it."""
        atexit.unregister(self.end)
        self._stream.close()
        until = time.monotonic() + _END_S
        with contextlib.suppress(ServerError):
            self.client.shutdown()
            while time.monotonic() < until:
                self.client.health()
                time.sleep(0.05)
        shutil.rmtree(self._folder, ignore_errors=True)


def _sweep() -> None:
    """Folders of kernels that were killed, once their servers have left too."""
    import psutil

    for folder in runtime_dir().glob("own-*-*"):
        pids = [int(folder.name.split("-")[1])]
        with contextlib.suppress(OSError, ValueError, KeyError):
            pids.append(json.loads((folder / "labkit" / "server.json").read_text())["pid"])
        if not any(map(psutil.pid_exists, pids)):
            shutil.rmtree(folder, ignore_errors=True)


_OWN: dict[str, _Own] = {}
"""By options: a first cell that is run again finds its server again."""


def _own_client(serve: Mapping[str, Any]) -> ServerClient:
    key = repr(sorted(serve.items()))
    own = _OWN.get(key)
    if own is None or not own.answers():
        if own is not None:
            own.end()
        _OWN[key] = own = _Own(serve)
    return own.client


def end_own_servers() -> None:
    """What the end of the kernel does."""
    while _OWN:
        _OWN.popitem()[1].end()
