"""A lab server of a lesson's own: for another model, for more ranks, or for nodes with a link between them.

The lab server belongs to everybody who is at it, so a lesson that needs another one neither ends nor changes it: it
starts one beside it, in a runtime folder of its own, where nobody else finds it. That one ends with the kernel; should
the kernel be killed, it ends by itself soon after, for nobody is at it any more, and takes its nodes with it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit.cluster.namespaces import INTERFACE, existing, inside
from labkit.cluster.nodes import why_not
from labkit.lab import Lab, connect
from labkit.paths import runtime_dir
from labkit.server.client import ServerError
from labkit.server.discovery import ServesOther, find, start_detached
from labkit.teach.html import box

_LINGER_S, _END_S = 10.0, 30.0
_NOT_MADE = "nodes could not be made"
"""Root and the tools are there, and the kernel still says no: as in a container without the right to it."""


class OwnServer:
    """There as long as this object is: an open event stream keeps it from leaving, whatever the reader does in it.

    `serve`: what `labkit serve` takes. Its ranks are up when it is made. Ends with its `with` block, with `end`, or
    with this process. Raises ServerError when it does not start.
    """

    note = ""
    """What is to be said of it, where it is shown."""

    def __init__(self, **serve: Any) -> None:
        _sweep()
        self._folder = Path(tempfile.mkdtemp(prefix=f"own-{os.getpid()}-", dir=runtime_dir()))
        env = {"LABKIT_RUNTIME": str(self._folder), "LABKIT_LINGER_S": str(_LINGER_S)}
        try:
            self.found = start_detached(serve, env, self._folder / "server.log")
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        atexit.register(self.end)
        try:
            self.client = self.found.client()
            self._held = self.client.events(lambda event: None, ["lease"])
            Lab(self.client).wait_ready()
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> OwnServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def where(self) -> dict[str, str]:
        """What `begin` needs to find it."""
        return {"model": self.found.model, "url": self.found.url, "token": self.found.token}

    @property
    def between(self) -> str:
        """What lies between the first half of the ranks and the second, in words."""
        return "between nodes" if self._links() else "between the halves of one node"

    def link_bytes(self) -> int | None:
        """What all nodes have sent over their links so far, headers and all; None where there are no links."""
        names = self._links()
        return sum(map(_sent, names)) if names else None

    def _links(self) -> list[str]:
        return [name for name in existing() if name.startswith(f"labkit-{self.found.pid}-") and "-n" in name]

    def answers(self) -> bool:
        try:
            return self.client.health() != "failed"
        except ServerError:
            return False

    def end(self) -> None:
        """Returns when its process is gone; its ranks and its nodes go before it does. A second time does nothing."""
        atexit.unregister(self.end)
        if held := getattr(self, "_held", None):
            held.close()
        with contextlib.suppress(ServerError):
            self.found.client().shutdown()
        give_up = time.monotonic() + _END_S
        while not _is_gone(self.found.pid):
            if time.monotonic() > give_up:
                os.kill(self.found.pid, signal.SIGKILL)  # whatever it made is removed by those who watch it
            time.sleep(0.05)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __repr__(self) -> str:
        return self.note or f"A server of this lesson's own, at {self.found.url}."

    def _repr_html_(self) -> str:
        return box(repr(self), "Where.")


def _is_gone(pid: int) -> bool:
    """It is a child of this process, so its end must be collected."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _sent(namespace: str) -> int:
    path = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
    return int(subprocess.check_output([*inside(namespace), "cat", path], text=True))


def _sweep() -> None:
    """Folders of kernels that were killed, once their servers have left too."""
    import psutil

    for folder in runtime_dir().glob("own-*-*"):
        pids = [int(folder.name.split("-")[1])]
        with contextlib.suppress(OSError, ValueError, KeyError):
            pids.append(json.loads((folder / "labkit" / "server.json").read_text())["pid"])
        if not any(map(psutil.pid_exists, pids)):
            shutil.rmtree(folder, ignore_errors=True)


def on_two_nodes(**serve: Any) -> tuple[OwnServer | None, str]:
    """A server on two nodes made on this machine; where they cannot be made, None and the sentence that says why.

    Raises ServerError when it does not start for another reason.
    """
    if reason := why_not():
        return None, reason
    try:
        return OwnServer(nodes=2, **serve), ""
    except ServerError as error:
        if _NOT_MADE not in str(error):
            raise
        return None, str(error)


# ---- for a lesson as a whole


_OWN: dict[str, OwnServer] = {}
"""By options: a first cell that is run again finds its server again."""


def lab_for(serve: Mapping[str, Any]) -> tuple[Lab, str]:
    """The lab server, found or started, and ""; or one of the kernel's own, and what the lab server serves.

    Raises ServerError when none can be had.
    """
    try:
        return connect(**serve), ""
    except ServesOther:
        found = find()
        return Lab(_own(serve).client), found.model if found else "another model"


def _own(serve: Mapping[str, Any]) -> OwnServer:
    key = repr(sorted(serve.items()))
    own = _OWN.get(key)
    if own is None or not own.answers():
        if own is not None:
            own.end()
        _OWN[key] = own = OwnServer(**serve)
    return own


def end_own_servers() -> None:
    """What the end of the kernel does."""
    while _OWN:
        _OWN.popitem()[1].end()
