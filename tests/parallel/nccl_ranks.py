"""What a rank with a GPU has its profiler and its door see of the same calls."""

from __future__ import annotations

import gzip
import json
import time
from typing import Any

import torch
import torch.distributed as dist

from labkit.engine.messages import Profile
from labkit.engine.profiling import StepProfiler
from labkit.parallel.comm import Door, Group
from labkit.parallel.fabric_torch import TorchFabric
from labkit.parallel.ring import EventRing
from tests.parallel.team import Rank

CALLS_A_STEP = 6
"""Kernels that `_step` launches: an all-to-all swaps its counts first."""
NUM_STEPS = 3


def profiled_calls(me: Rank) -> dict[str, Any]:
    """The trace of NUM_STEPS steps of collectives on two GPUs."""
    device = torch.device("cuda", me.rank)
    torch.cuda.set_device(device)
    fabric = TorchFabric("nccl", dist.FileStore(str(me.folder / "profiled"), 2))
    door = Door(EventRing())
    group = Group(me.rank, 2, "tp", (0, 1), wire=fabric.open("profiled", (0, 1), me.rank), door=door)
    _step(group, device)
    door.drain()
    profiler, done = StepProfiler(me.rank, device), None
    profiler.begin(Profile(0, 0, NUM_STEPS))
    for step_id in range(NUM_STEPS):
        profiler.before()
        start_ns = time.monotonic_ns()
        _step(group, device)
        ring = door.drain()
        done = profiler.after(step_id, start_ns, time.monotonic_ns(), ring)
    assert done is not None
    return json.loads(gzip.decompress(done.trace))


def _step(group: Group, device: torch.device) -> None:
    x = torch.ones(64, 128, device=device)
    group.all_reduce(x)
    group.all_gather(x)
    group.reduce_scatter(x)
    group.broadcast(x, 0)
    group.all_to_all([x, x])
    torch.cuda.synchronize(device)
