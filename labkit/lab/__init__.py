"""The lab in Python: `lab = labkit.connect()`, `run = lab.run("tp2", "chat", rate=4, seconds=30)`.

The names below are imported when they are first used, so that a shell command pays only for what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.lab.compare import Comparison
    from labkit.lab.engine_run import run_engine
    from labkit.lab.lab import Lab, connect, run_against
    from labkit.lab.live import LiveSession
    from labkit.lab.plan import RunPlan
    from labkit.lab.profiling import Profile
    from labkit.lab.run import Run, open_store
    from labkit.measure.metrics import Objective

_HOMES = {
    "Comparison": "labkit.lab.compare",
    "Lab": "labkit.lab.lab",
    "LiveSession": "labkit.lab.live",
    "Objective": "labkit.measure.metrics",
    "Profile": "labkit.lab.profiling",
    "Run": "labkit.lab.run",
    "RunPlan": "labkit.lab.plan",
    "connect": "labkit.lab.lab",
    "open_store": "labkit.lab.run",
    "run_against": "labkit.lab.lab",
    "run_engine": "labkit.lab.engine_run",
}
__all__ = [
    "Comparison",
    "Lab",
    "LiveSession",
    "Objective",
    "Profile",
    "Run",
    "RunPlan",
    "connect",
    "open_store",
    "run_against",
    "run_engine",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'labkit.lab' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
