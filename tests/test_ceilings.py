"""What was measured of a device is kept, found again for a run on it, and stands beside what a profile reached."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from labkit.lab.bench_device import DevicePlan, device_summary
from labkit.lab.ceilings import ceilings_of, keep
from labkit.lab.roofs import machine_roofs
from labkit.measure.device import row
from labkit.measure.roofs import MachineRoofs

GB = 10**9


def measured(device: str = "cpu", num_ranks: int = 2, **changes: Any) -> dict[str, Any]:
    """A copy of 1 GB in 0.1 s alone and 0.2 s together; a product of side 1000 in 10 ms, and 20 ms together."""
    rows = []
    for rank in range(num_ranks):
        for together in (False, True):
            for what, size, ns in (("copy", GB, GB // 10), ("matmul", 1000, GB // 100)):
                took = [ns * (2 if together else 1)] * 3
                rows.append(row(what, "float32", size, took, wrong=0, together=together, rank=rank, device=device,
                                in_cache=False))  # fmt: skip
    return device_summary(DevicePlan(num_ranks=num_ranks, threads=1), rows) | changes


def environment(**changes: Any) -> dict[str, Any]:
    where = {"host": socket.gethostname(), "device": "cpu", "threads_per_rank": 1, "num_ranks": 2, "dtype": "float32"}
    return where | changes


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))


def test_a_rank_among_as_many_has_its_share_and_one_alone_has_all() -> None:
    assert ceilings_of(environment()) is None
    assert keep(measured())
    among, alone = ceilings_of(environment()), ceilings_of(environment(num_ranks=1))
    assert among is not None and alone is not None
    assert (among.copy_gb_s, among.gflop_s, among.shared) == (pytest.approx(10), pytest.approx(100), True)
    assert (alone.copy_gb_s, alone.gflop_s, alone.shared) == (pytest.approx(20), pytest.approx(200), False)
    told = among.sentence({"gflop_s": 25.0, "gb_s": 8.0})
    assert "25 GFLOP/s, 25% of 100 in float32 and 8 GB/s, 80% of 10 copied (a rank's, all ranks at work" in told
    half = ceilings_of(environment(dtype="bfloat16"))
    assert half is not None and "25 GFLOP/s (ceiling not measured)" in half.sentence({"gflop_s": 25.0, "gb_s": 8.0})


def test_gpus_of_one_kind_are_alike_and_threads_are_not() -> None:
    assert keep(measured("cuda:0 NVIDIA H100", num_ranks=1)) and keep(measured())
    assert ceilings_of(environment(device="cuda:3 NVIDIA H100", num_ranks=1)) is not None
    assert ceilings_of(environment(device="cuda:0 NVIDIA B200")) is None
    assert ceilings_of(environment(threads_per_rank=4)) is None and ceilings_of(environment(host="elsewhere")) is None


def test_a_gpu_stands_under_what_was_measured_of_it() -> None:
    gpu = environment(device="cuda:1 NVIDIA H100", num_ranks=1, backend="cuda")
    assert machine_roofs(gpu, lambda: True) is None
    assert keep(measured("cuda:0 NVIDIA H100", num_ranks=1))
    assert machine_roofs(gpu, lambda: False) == MachineRoofs(pytest.approx(20), pytest.approx(200))


def test_what_is_wrong_or_fits_a_cache_is_no_ceiling() -> None:
    found = measured()
    assert not keep({**found, "wrong": 1}) and not keep({**found, "rows": [{**found["rows"][0], "in_cache": True}]})
    assert ceilings_of(environment()) is None
