"""A rank whose sums are wrong by one in one place, as a broken link's would be."""

from __future__ import annotations

import os
import sys

from torch import Tensor

from labkit.engine.bench_worker import BenchRunner
from labkit.engine.worker import serve
from labkit.parallel.fabric_shm import ShmWire

_honest = ShmWire.all_reduce


def _lie(wire: ShmWire, x: Tensor) -> None:
    _honest(wire, x)
    if wire.rank == 1:
        x.view(-1)[3] += 1


if __name__ == "__main__":
    ShmWire.all_reduce = _lie  # type: ignore[method-assign]
    status = serve(BenchRunner)
    sys.stdout.flush()
    os._exit(status)
