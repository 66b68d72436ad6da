"""Telemetry: NVML by a stand-in of its module, and psutil on this very process."""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from labkit.measure import gpu
from labkit.measure.gpu import HostSource, NvmlSource, open_source


class Nvml:
    """Two GPUs; the second tells neither its energy nor its links."""

    class NVMLError(Exception):
        pass

    def __init__(self, count: int = 2) -> None:
        self.count, self.energy_mj, self.sent_kib, self.stopped = count, 5_000_000, 1000, False

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.stopped = True

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=0 if handle else 73)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(used=10, total=80)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:  # noqa: N802
        if handle:
            raise self.NVMLError("not supported")
        return self.energy_mj

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
        return 90_000

    def nvmlDeviceGetClockInfo(self, handle: int, which: int) -> int:  # noqa: N802
        return {1: 1980, 2: 2619}[which]

    def nvmlDeviceGetPcieThroughput(self, handle: int, way: int) -> int:  # noqa: N802
        return (2, 3)[way]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:  # noqa: N802
        return 0x1 if handle else 0x1 | 0x4 | 0x40

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[tuple[int, int]]) -> list[Any]:  # noqa: N802
        assert fields == [(138, 0xFFFFFFFF), (139, 0xFFFFFFFF)]
        code = 3 if handle else 0
        return [SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(ullVal=kib)) for kib in (self.sent_kib, 0)]


def test_each_gpu_tells_what_it_knows_and_rates_are_of_the_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic_ns=lambda: now[0])
    now = [10**9]
    monkeypatch.setattr(gpu, "time", clock)
    nvml = Nvml()
    source = NvmlSource(nvml)
    first = source.sample()
    assert [(each.kind, each.index) for each in first] == [("host", 0), ("gpu", 0), ("gpu", 1)]
    assert "nvlink_tx_bytes_per_s" not in first[1].values and first[1].values["power_w"] == 90  # no difference yet
    now[0] += 2 * 10**9
    nvml.energy_mj += 1_400_000
    nvml.sent_kib += 4096
    _, one, two = source.sample()
    assert one.values == {
        "utilisation_percent": 73, "memory_used_bytes": 10, "memory_total_bytes": 80, "power_w": 700, "sm_mhz": 1980,
        "memory_mhz": 2619, "pcie_tx_bytes_per_s": 2000, "pcie_rx_bytes_per_s": 3000,
        "nvlink_tx_bytes_per_s": 2048 * 1024, "nvlink_rx_bytes_per_s": 0,
    }  # fmt: skip
    assert one.throttles == ["power cap", "hot (hardware)"] and two.throttles == []
    assert two.values["utilisation_percent"] == 0 and two.values["power_w"] == 90
    assert not [name for name in two.values if "nvlink" in name]


def test_without_a_gpu_the_processes_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = Nvml(count=0)
    monkeypatch.setitem(sys.modules, "pynvml", empty)  # type: ignore[arg-type]
    assert open_source(dict).name == "psutil" and empty.stopped
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())  # type: ignore[arg-type]
    assert open_source(dict).name == "nvml"
    monkeypatch.setitem(sys.modules, "pynvml", None)  # type: ignore[arg-type]
    assert open_source(dict).name == "psutil"


def test_a_rank_that_computes_is_seen_and_one_that_has_gone_is_no_row() -> None:
    source = HostSource(lambda: {0: os.getpid(), 1: 2**22 + 1})
    first = source.sample()
    assert [(each.kind, each.index) for each in first] == [("host", 0), ("rank", 0)]
    assert first[1].values["memory_used_bytes"] > 10**6 and "cpu_cores" not in first[1].values
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    host, rank = source.sample()
    assert rank.values["cpu_cores"] > 0
    assert 0 < host.values["memory_used_bytes"] < host.values["memory_total_bytes"]
