"""labkit: see, measure and decide how to split LLM inference across GPUs.

`import labkit` costs nothing: what is named here is imported when it is first used, and torch only by the
ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.lab import Lab, Objective, Run, connect, run_against, run_engine
    from labkit.layout import Layout

__version__ = "0.1.0"
__all__ = ["Lab", "Layout", "Objective", "Run", "connect", "run_against", "run_engine"]
_HOMES = {"Layout": "labkit.layout"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'labkit' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES.get(name, "labkit.lab")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
