"""Whose a run is while it lasts, so that one whose client was killed is not taken for one that still runs."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

import psutil

KILLED = "killed"
"""Of a run that its client neither finished nor stopped: that process has gone."""


def this_client() -> dict[str, Any]:
    """For the run's row, before its first request. A number alone may be another process's later, so its birth too."""
    return {"client": {"host": socket.gethostname(), "pid": os.getpid(), "born": psutil.Process().create_time()}}


def status_of(row: Mapping[str, Any]) -> str:
    """As stored, but `killed` for a run that cannot be running any more; who runs on another host is not known here."""
    client = (row.get("environment") or {}).get("client")
    if row["status"] != "running" or not client or client["host"] != socket.gethostname():
        return str(row["status"])
    return "running" if _lives(client["pid"], client["born"]) else KILLED


def _lives(pid: int, born: float) -> bool:
    try:
        return abs(psutil.Process(pid).create_time() - born) < 1
    except psutil.Error:
        return False
