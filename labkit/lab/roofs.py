"""This machine's roofs for a page: measured by a short process of its own while the ranks are idle, and kept for a day.

Without them own work is "computing"; with them it is told whether memory or products hold it up. The measurement takes
all cores for a second, so nobody's load may be under way, before or after.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from labkit.lab.ceilings import ceilings_of
from labkit.measure.roofs import MachineRoofs
from labkit.paths import home_dir

QUIET_LOAD = 0.5
"""Of the cores, over the last minute: a roof taken on a busy machine is too low, and work would stand above it."""
KEPT_S = 24 * 3600.0
_TIMEOUT_S = 60.0
_MEASURE = (
    "import json; from labkit.measure.roofs import MachineRoofs; r = MachineRoofs.measured(3); "
    "print(json.dumps({'read_gb_s': r.read_gb_s, 'gflop_s': r.gflop_s}))"
)


def gpu_roofs(environment: Mapping[str, Any]) -> MachineRoofs | None:
    """Of one GPU, as `labkit bench device` measured it on this host; None where it did not."""
    found = ceilings_of(environment)
    return MachineRoofs(found.copy_gb_s, found.gflop_s) if found and found.copy_gb_s and found.gflop_s else None


def machine_roofs(environment: Mapping[str, Any], is_idle: Callable[[], bool]) -> MachineRoofs | None:
    """None for ranks on another host, GPUs that were not measured, and while somebody's load is under way."""
    if environment.get("host") != socket.gethostname():
        return None
    if environment.get("backend") != "cpu":
        return gpu_roofs(environment)
    kept = _kept(home_dir() / "roofs.json")
    if kept is not None or not is_idle():
        return kept
    found = _measured()
    if found is None or not is_idle():
        return None
    _keep(home_dir() / "roofs.json", found)
    return found


def is_quiet() -> bool:
    return os.getloadavg()[0] <= QUIET_LOAD * (os.cpu_count() or 1)


def _kept(path: Path) -> MachineRoofs | None:
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        fresh = row.pop("host") == socket.gethostname() and 0 <= time.time() - row.pop("at") < KEPT_S
        return MachineRoofs(**row) if fresh else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # never measured, or not written whole


def _keep(path: Path, roofs: MachineRoofs) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    row = {"host": socket.gethostname(), "at": time.time(), **asdict(roofs)}
    path.write_text(json.dumps(row), encoding="utf-8")


def _measured() -> MachineRoofs | None:
    """In a process of its own: the measurement holds a quarter of a GiB for a moment, and a page's kernel is small."""
    try:
        done = subprocess.run([sys.executable, "-c", _MEASURE], capture_output=True, timeout=_TIMEOUT_S, check=True)
        return MachineRoofs(**json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError):
        return None
