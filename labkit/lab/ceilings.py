"""What `labkit bench device` measured of this host's devices, kept so that a profile's rates can stand beside it.

One file, the newest measurement of each kind of device and number of threads; a copy that fits a cache says nothing of
memory and is not kept.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from labkit.paths import home_dir


@dataclass(frozen=True)
class Ceilings:
    """Of one rank's device; None: not measured."""

    copy_gb_s: float | None
    gflop_s: float | None
    dtype: str
    measured_at: str
    shared: bool
    """With as many ranks at work as the run has; else the device was alone."""

    def sentence(self, products: Mapping[str, float]) -> str:
        """Achieved rates of products beside it, each with its share."""
        flops = _beside(products["gflop_s"], self.gflop_s, "GFLOP/s")
        moved = _beside(products["gb_s"], self.copy_gb_s, "GB/s")
        how = "all ranks at work" if self.shared else "alone"
        return (
            f"products reach {flops} in {self.dtype} and {moved} copied "
            f"(a rank's, {how}, by labkit bench device, {self.measured_at[:10]})"
        )


def _beside(rate: float, ceiling: float | None, unit: str) -> str:
    if not ceiling:
        return f"{rate:.3g} {unit} (ceiling not measured)"
    return f"{rate:.3g} {unit}, {rate / ceiling:.0%} of {ceiling:.3g}"


def keep(found: Mapping[str, Any]) -> bool:
    """found: as of `device_summary`. False where it is no ceiling: wrong results, or a buffer that fits a cache."""
    rows = found["rows"]
    if found["wrong"] or not rows or any(row["in_cache"] for row in rows):
        return False
    told = {name: found[name] for name in ("ranks", "copy_gb_s", "gflop_s")}
    everything = _read() | {
        _key(rows[0]["device"], found["threads_per_rank"]): {**told, "at": datetime.now(UTC).isoformat()}
    }
    draft = _path().with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(everything, indent=1))
    draft.replace(_path())
    return True


def ceilings_of(environment: Mapping[str, Any]) -> Ceilings | None:
    """Of a run's ranks; None where the run was elsewhere, or its devices were not measured here."""
    if environment.get("host") != socket.gethostname():
        return None
    found = _read().get(_key(environment["device"], environment["threads_per_rank"]))
    if found is None:
        return None
    num_ranks, dtype = environment["num_ranks"], environment["dtype"]
    shared = found["ranks"] == num_ranks > 1
    rates = found["copy_gb_s"], found["gflop_s"].get(dtype) or {}
    each = [_of_rank(pair, num_ranks if shared else 0) for pair in rates]
    return Ceilings(each[0], each[1], dtype, found["at"], shared)


def _of_rank(pair: Mapping[str, float | None], together: int) -> float | None:
    whole = pair.get("together") if together else pair.get("alone")
    return whole / together if whole and together else whole


def _key(device: str, threads: int) -> str:
    """GPUs of one kind are alike, whichever number they have; a CPU rank is as fast as its threads."""
    kind = re.sub(r"^cuda:\d+ ", "", device)
    return f"{kind}, {threads} threads" if kind == device else kind


def _path() -> Path:
    return home_dir() / "ceilings.json"


def _read() -> dict[str, Any]:
    try:
        told = json.loads(_path().read_text())
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}
