"""A server of a lesson's own, for what the shared one does not have: eight ranks, and nodes with a link between them.

It is hidden from discovery (a runtime folder of its own), its runs go where all runs go, and it goes when the lesson's
kernel does: at once if the kernel ends in order, and seconds after its last connection if it was killed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit.cluster.namespaces import INTERFACE, existing, inside
from labkit.cluster.nodes import why_not
from labkit.cluster.topology import look_at_machine
from labkit.server import discovery
from labkit.server.client import ServerError
from labkit.teach.html import box

_LINGER_S = "10"


class OwnServer:
    """`options`: what `labkit serve` takes. Ends with `close`, or with this process. Raises ServerError."""

    def __init__(self, note: str = "", **options: Any) -> None:
        self.note = note
        self._folder = Path(tempfile.mkdtemp(prefix="labkit-own-"))
        env = {"LABKIT_RUNTIME": str(self._folder), "LABKIT_LINGER_S": _LINGER_S}
        try:
            self.found = discovery.start_detached(options, env, self._folder / "server.log")
            self._client = self.found.client()
            self._held = self._client.events(lambda event: None, ["state"])  # a client, so that it does not leave
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        atexit.register(self.close)

    @property
    def where(self) -> dict[str, str]:
        """What `begin` needs to find it."""
        return {"model": self.found.model, "url": self.found.url, "token": self.found.token}

    @property
    def between(self) -> str:
        """What lies between the first half of the ranks and the second, in words."""
        return "between nodes" if self._links() else "between the halves of one node"

    def _links(self) -> list[str]:
        return [name for name in existing() if name.startswith(f"labkit-{self.found.pid}-") and "-n" in name]

    def link_bytes(self) -> int | None:
        """What all nodes have sent over their links so far, headers and all; None where there are no links."""
        names = self._links()
        return sum(map(_sent, names)) if names else None

    def close(self) -> None:
        """End the server, its ranks and its nodes; a second time does nothing."""
        atexit.unregister(self.close)
        self._held.close()
        with contextlib.suppress(ServerError):
            self._client.shutdown()
        _await_end(self.found.pid)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __repr__(self) -> str:
        return self.note or f"A server of this lesson's own, at {self.found.url}."

    def _repr_html_(self) -> str:
        return box(repr(self), "Where.")


def _await_end(pid: int, timeout_s: float = 10.0) -> None:
    """The server is this process's child: it is waited for, so that its nodes are gone when `close` returns."""
    give_up = time.monotonic() + timeout_s
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < give_up:
            time.sleep(0.05)


def _sent(namespace: str) -> int:
    path = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
    return int(subprocess.check_output([*inside(namespace), "cat", path], text=True))


def two_nodes(model: str, ranks_per_node: int, link: str) -> OwnServer:
    """Two nodes with a link between them; on a machine that cannot make any, as many ranks on one node, with the
    sentence that says why."""
    num_ranks = 2 * ranks_per_node
    gpus = look_at_machine().gpus
    device: dict[str, Any] = {"device": "cpu"} if len(gpus) < num_ranks else {}
    if reason := why_not():
        note = f"One node of {num_ranks} ranks, so no link is slow here, and only the bytes can be compared: {reason}"
        return OwnServer(note, model=model, ranks=num_ranks, **device)
    note = f"Two nodes of {ranks_per_node} ranks on this machine, each with a link of {link}; they go with this kernel."
    return OwnServer(note, model=model, nodes=2, ranks_per_node=ranks_per_node, link=link, **device)


def node_map(state: dict[str, Any], ranks_per_node: int) -> Sequence[int]:
    """The node of each rank, as the ranks told it; where they stand on one node, what it would be on two."""
    if len(state["nodes"]) > 1:
        told = {rank: entry["node"] for entry in state["nodes"] for rank in entry["ranks"]}
        return [told[rank] for rank in sorted(told)]
    return [rank // ranks_per_node for rank in range(state["num_ranks"])]
