"""What joins GPUs, by a stand-in of NVML."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from labkit.cluster.gpu_links import GpuLink, gpu_links, numa_node


class Nvml:
    class NVMLError(Exception):
        pass

    def __init__(self, links: dict[int, list[str]], levels: dict[tuple[int, int], int]) -> None:
        self.links, self.levels = links, levels

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(busId=f"0000:0{handle}:00.0".encode())

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:  # noqa: N802
        if link >= len(self.links[handle]):
            raise self.NVMLError("invalid argument")
        return int(self.links[handle][link] != "down")

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:  # noqa: N802
        return SimpleNamespace(busId=self.links[handle][link])

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:  # noqa: N802
        if (one, other) not in self.levels:
            raise self.NVMLError("not supported")
        return self.levels[one, other]

    def nvmlDeviceGetNumaNodeId(self, handle: int) -> int:  # noqa: N802
        if handle:
            raise self.NVMLError("not supported")
        return 1


def test_nvlinks_from_gpu_to_gpu_are_counted_by_pair() -> None:
    links = {0: ["0000:01:00.0", "0000:01:00.0", "down"], 1: ["0000:00:00.0", "0000:00:00.0"], 2: []}
    found = gpu_links(Nvml(links, {(0, 1): 10, (0, 2): 50}), 3)
    assert found == (GpuLink(0, 1, 2, "one PCIe switch"), GpuLink(0, 2, 0, "across NUMA nodes"), GpuLink(1, 2, 0, ""))


def test_through_a_switch_every_gpu_is_reached_by_all_links() -> None:
    links = {gpu: ["0000:f0:00.0", "0000:f1:00.0"] for gpu in range(2)}
    assert gpu_links(Nvml(links, {}), 2) == (GpuLink(0, 1, 2, ""),)


def test_a_gpus_numa_node_is_told_or_unknown() -> None:
    nvml = Nvml({}, {})
    assert (numa_node(nvml, 0), numa_node(nvml, 1), numa_node(SimpleNamespace(), 0)) == (1, None, None)
