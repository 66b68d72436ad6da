"""What the devices say of themselves beside a run: NVML's figures of each GPU, or without it psutil's of each rank.

A sample is a row for each GPU (or rank's process) and one of the host. What a device does not tell is left out, never
a zero. Rates come from the counters' differences between two samples, so the first sample has none. NVML's
`utilisation` is the share of time in which any kernel ran, not how much of the device it used.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import psutil

from labkit.measure.records import TelemetryRecord

PERIOD_S = 0.2
_NVLINK_ALL, _NVLINK_TX, _NVLINK_RX = 0xFFFFFFFF, 138, 139
"""Scope of all links; NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX: KiB since the driver's start."""
_THROTTLES = {
    0x4: "power cap", 0x8: "hardware slowdown", 0x20: "hot (software)", 0x40: "hot (hardware)", 0x80: "power brake",
    0x10: "sync boost", 0x2: "application clocks",
}  # fmt: skip
"""Bits of nvmlDeviceGetCurrentClocksThrottleReasons; 0x1 is idleness, which slows nothing."""


class Source(Protocol):
    name: str

    def sample(self) -> list[TelemetryRecord]: ...

    def close(self) -> None: ...


class _Rates:
    """Rates of counters that only grow."""

    def __init__(self) -> None:
        self._last: dict[Any, tuple[int, float]] = {}

    def of(self, key: Any, now_ns: int, value: float) -> float | None:
        """A second; None the first time, and where a counter began anew."""
        before = self._last.get(key)
        self._last[key] = (now_ns, value)
        if before is None or now_ns <= before[0] or value < before[1]:
            return None
        return (value - before[1]) * 1e9 / (now_ns - before[0])


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None}


class HostSource:
    """psutil: each rank's process, and the host's memory and network. pids: by rank, as they are now."""

    name = "psutil"

    def __init__(self, pids: Callable[[], Mapping[int, int]]) -> None:
        self._pids, self._rates = pids, _Rates()
        self._processes: dict[int, psutil.Process] = {}

    def sample(self) -> list[TelemetryRecord]:
        now_ns = time.monotonic_ns()
        found = [self.host(now_ns)]
        for rank, pid in sorted(self._pids().items()):
            with contextlib.suppress(psutil.Error):  # a rank that has gone is no row
                found.append(TelemetryRecord(now_ns, self.name, "rank", rank, self._process(now_ns, pid)))
        return found

    def _process(self, now_ns: int, pid: int) -> dict[str, float]:
        if pid not in self._processes:
            self._processes[pid] = psutil.Process(pid)
        process = self._processes[pid]
        times = process.cpu_times()
        cores = self._rates.of(("cpu", pid), now_ns, times.user + times.system)
        return _known({"cpu_cores": cores, "memory_used_bytes": process.memory_info().rss})

    def host(self, now_ns: int) -> TelemetryRecord:
        memory, net = psutil.virtual_memory(), psutil.net_io_counters()
        values = {"memory_used_bytes": memory.total - memory.available, "memory_total_bytes": memory.total}
        if net is not None:
            values["net_sent_bytes_per_s"] = self._rates.of("sent", now_ns, net.bytes_sent)
            values["net_received_bytes_per_s"] = self._rates.of("received", now_ns, net.bytes_recv)
        return TelemetryRecord(now_ns, self.name, "host", 0, _known(values))

    def close(self) -> None:
        self._processes.clear()


class NvmlSource:
    """NVML's figures of every GPU. nvml: the module pynvml, started."""

    name = "nvml"

    def __init__(self, nvml: Any) -> None:
        self._nvml, self._rates = nvml, _Rates()
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        self._host = HostSource(dict)

    def sample(self) -> list[TelemetryRecord]:
        gpus = [self._gpu(index, handle) for index, handle in enumerate(self._handles)]
        return [self._host.host(time.monotonic_ns()), *gpus]

    def _ask(self, name: str, *arguments: Any) -> Any:
        """None: this device, or this driver, does not tell."""
        ask = getattr(self._nvml, name, None)
        if ask is None:
            return None
        try:
            return ask(*arguments)
        except self._nvml.NVMLError:
            return None

    def _gpu(self, index: int, handle: Any) -> TelemetryRecord:
        now_ns = time.monotonic_ns()
        busy, memory = (self._ask(f"nvmlDeviceGet{what}", handle) for what in ("UtilizationRates", "MemoryInfo"))
        values: dict[str, float | None] = {
            "utilisation_percent": busy and busy.gpu,
            "memory_used_bytes": memory and memory.used,
            "memory_total_bytes": memory and memory.total,
            "power_w": self._power(index, handle, now_ns),
            "sm_mhz": self._ask("nvmlDeviceGetClockInfo", handle, 1),
            "memory_mhz": self._ask("nvmlDeviceGetClockInfo", handle, 2),
            "temperature_c": self._ask("nvmlDeviceGetTemperature", handle, 0),
            **self._traffic(index, handle, now_ns),
        }
        bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
        throttles = [why for bit, why in _THROTTLES.items() if bits & bit]
        return TelemetryRecord(now_ns, self.name, "gpu", index, _known(values), throttles)

    def _power(self, index: int, handle: Any, now_ns: int) -> float | None:
        """Watts: of the energy spent since the last sample; where that is not counted, of this moment."""
        energy_mj = self._ask("nvmlDeviceGetTotalEnergyConsumption", handle)
        mean_mw = None if energy_mj is None else self._rates.of(("energy", index), now_ns, energy_mj)
        power_mw = self._ask("nvmlDeviceGetPowerUsage", handle) if mean_mw is None else mean_mw
        return None if power_mw is None else power_mw / 1e3

    def _traffic(self, index: int, handle: Any, now_ns: int) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        for code, way in enumerate(("tx", "rx")):
            kb_per_s = self._ask("nvmlDeviceGetPcieThroughput", handle, code)
            found[f"pcie_{way}_bytes_per_s"] = None if kb_per_s is None else kb_per_s * 1000
        fields = self._ask("nvmlDeviceGetFieldValues", handle, [(_NVLINK_TX, _NVLINK_ALL), (_NVLINK_RX, _NVLINK_ALL)])
        for way, value in zip(("tx", "rx"), fields or [], strict=False):
            if value.nvmlReturn == 0:
                total = value.value.ullVal * 1024
                found[f"nvlink_{way}_bytes_per_s"] = self._rates.of(("nvlink", way, index), now_ns, total)
        return found

    def close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()


def open_source(pids: Callable[[], Mapping[int, int]]) -> Source:
    """NVML where it starts and has a GPU; else psutil."""
    try:
        import pynvml
    except ImportError:
        return HostSource(pids)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return HostSource(pids)
    source = NvmlSource(pynvml)
    if source._handles:
        return source
    source.close()
    return HostSource(pids)
