"""What joins the GPUs of one machine: NVLinks, or the way over PCIe and between sockets, as NVML tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_WAYS = {
    0: "same board", 10: "one PCIe switch", 20: "several PCIe switches", 30: "one PCIe host bridge",
    40: "one NUMA node", 50: "across NUMA nodes",
}  # fmt: skip
"""nvmlGpuTopologyLevel_t: the nearest thing that two devices have in common."""
_MOST_NVLINKS = 18
_ACTIVE = 1


@dataclass(frozen=True)
class GpuLink:
    first: int
    second: int
    num_nvlinks: int
    """Active NVLinks of the first that lead to the second, or, through a switch, to every other GPU; 0: none."""
    way: str
    """What PCIe's way between them goes through; empty where NVML does not tell."""


def gpu_links(nvml: Any, num_gpus: int) -> tuple[GpuLink, ...]:
    """Of every pair. nvml: the module pynvml, started."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(num_gpus)]
    buses = [_bus(nvml, handle) for handle in handles]
    peers = [_peers(nvml, handle) for handle in handles]
    return tuple(
        GpuLink(a, b, _num_nvlinks(peers[a], buses[b], buses), _way(nvml, handles[a], handles[b]))
        for a in range(num_gpus)
        for b in range(a + 1, num_gpus)
    )


def numa_node(nvml: Any, handle: Any) -> int | None:
    """The NUMA node that the GPU hangs on; None where NVML does not tell."""
    ask = getattr(nvml, "nvmlDeviceGetNumaNodeId", None)
    try:
        return None if ask is None else int(ask(handle))
    except nvml.NVMLError:
        return None


def _bus(nvml: Any, handle: Any) -> str:
    return _text(nvml.nvmlDeviceGetPciInfo(handle).busId)


def _text(given: str | bytes) -> str:
    return (given.decode() if isinstance(given, bytes) else given).lower()


def _peers(nvml: Any, handle: Any) -> list[str]:
    """The bus id at the other end of each active NVLink: a GPU's, or a switch's."""
    found = []
    for link in range(_MOST_NVLINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link) == _ACTIVE:
                found.append(_text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId))
        except nvml.NVMLError:  # no such link on this device
            break
    return found


def _num_nvlinks(peers: list[str], bus: str, buses: list[str]) -> int:
    through_switch = [peer for peer in peers if peer not in buses]
    return peers.count(bus) or len(through_switch)


def _way(nvml: Any, one: Any, other: Any) -> str:
    try:
        return _WAYS.get(int(nvml.nvmlDeviceGetTopologyCommonAncestor(one, other)), "")
    except nvml.NVMLError:
        return ""
