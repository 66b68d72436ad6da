"""NCCL behind the same wire, and calls timed by events that are read after the step. These need GPUs."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from labkit.measure.kernels import COLLECTIVE_CAT, parse
from labkit.measure.recorder import OPS, RING_DTYPE
from labkit.parallel.comm import Door, Group
from labkit.parallel.fabric_torch import TorchFabric
from labkit.parallel.ring import EventRing
from tests.parallel import nccl_ranks, on_ranks
from tests.parallel.team import Team


@pytest.mark.gpu
def test_events_are_instants_of_the_hosts_clock_and_a_captured_call_leaves_no_row(tmp_path: Path) -> None:
    torch.cuda.set_device(0)
    wire = TorchFabric("nccl", dist.FileStore(str(tmp_path / "store"), 1)).open("alone", (0,), 0)
    door = Door(EventRing())
    group = Group(0, 1, "tp", (0,), wire=wire, door=door)
    x = torch.ones(1 << 20, device="cuda")
    group.all_reduce(x)
    door.drain()
    began_ns = time.monotonic_ns()
    for layer in range(3):
        door.layer = layer
        group.all_reduce(x)
    rows = np.frombuffer(door.drain(), RING_DTYPE)
    ended_ns = time.monotonic_ns()
    slack_ns = 200_000
    assert [OPS[op] for op in rows["op"]] == ["all_reduce"] * 3 and rows["layer"].tolist() == [0, 1, 2]
    assert (rows["enter_ns"] <= rows["exit_ns"]).all() and (np.diff(rows["enter_ns"]) > 0).all()
    assert began_ns - slack_ns <= rows["enter_ns"][0] and rows["exit_ns"][-1] <= ended_ns + slack_ns

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        group.all_reduce(x)
    graph.replay()
    assert door.drain() == b""
    assert x[0] == 1
    del graph
    wire.close()


@pytest.mark.multi_gpu
def test_every_call_over_nccl_gives_what_one_process_computes(team: Team) -> None:
    for got, want in team.run(on_ranks.every_call_over_nccl, ranks=(0, 1)):
        assert sorted(got) == sorted(want)
        for name in want:
            for a, b in zip(got[name], want[name], strict=True):
                torch.testing.assert_close(a, b, msg=name)


@pytest.mark.multi_gpu
def test_the_profilers_kernels_are_the_doors_rows_one_for_one(team: Team) -> None:
    for trace in team.run(nccl_ranks.profiled_calls, ranks=(0, 1)):
        found = parse(trace).nccl
        assert found is not None and found.num_differing == 0, found
        assert found.num_matched == nccl_ranks.NUM_STEPS * nccl_ranks.CALLS_A_STEP
        rows = [event for event in trace["traceEvents"] if event.get("cat") == COLLECTIVE_CAT]
        trace["traceEvents"].remove(rows[0])
        missing = parse(trace).nccl
        assert missing is not None and missing.num_differing > 0
