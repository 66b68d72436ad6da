"""What tests of nodes on one machine need: whether they can be made here, and what is left of them."""

from __future__ import annotations

import subprocess
import time

import pytest

from labkit.cluster.namespaces import INTERFACE, existing
from labkit.cluster.nodes import why_not

needs_nodes = pytest.mark.skipif(bool(why_not()), reason=why_not() or "nodes can be made here")


def of_owner(pid: int) -> list[str]:
    return [name for name in existing() if name.startswith(f"labkit-{pid}-")]


def bytes_sent(namespace: str) -> int:
    """Through the node's link since it was made, headers and all."""
    path = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
    return int(subprocess.run(["ip", "netns", "exec", namespace, "cat", path], capture_output=True, text=True).stdout)


def wait_gone(pid: int, timeout_s: float = 5.0) -> None:
    give_up = time.monotonic() + timeout_s
    while of_owner(pid):
        assert time.monotonic() < give_up, f"left: {of_owner(pid)}"
        time.sleep(0.02)
