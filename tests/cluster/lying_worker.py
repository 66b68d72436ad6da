"""A rank whose sums, and what it sends, are wrong by one in one place, as a broken link's would be."""

from __future__ import annotations

import os
import sys

from torch import Tensor

from labkit.engine.bench_worker import BenchRunner
from labkit.engine.worker import serve
from labkit.parallel.fabric_shm import ShmWire
from labkit.parallel.wire import Pending

_honest, _honest_send = ShmWire.all_reduce, ShmWire.isend


def _lie(wire: ShmWire, x: Tensor) -> None:
    _honest(wire, x)
    if wire.rank == 1:
        x.view(-1)[3] += 1


def _send_wrong(wire: ShmWire, x: Tensor, dst: int) -> Pending:
    sent = x.clone()
    sent.view(-1)[3] += wire.rank
    return _honest_send(wire, sent, dst)


if __name__ == "__main__":
    ShmWire.all_reduce = _lie  # type: ignore[method-assign]
    ShmWire.isend = _send_wrong  # type: ignore[method-assign]
    status = serve(BenchRunner)
    sys.stdout.flush()
    os._exit(status)
