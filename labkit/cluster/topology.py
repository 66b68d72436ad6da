"""What one machine offers to ranks: cores, memory, shared memory, devices, and the fabric that joins them.

Torch-free: GPUs are counted through NVML when nvidia-ml-py is there, so a dashboard or a shell can ask without loading
half a gigabyte. What could not be found out is None, never a guess.
"""

from __future__ import annotations

import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from labkit.cluster.gpu_links import GpuLink, gpu_links, numa_node


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    memory_bytes: int
    numa_node: int | None = None
    """The one that it hangs on; None: not told."""


@dataclass(frozen=True)
class Machine:
    host: str
    num_cores: int
    memory_bytes: int
    available_bytes: int
    shm_bytes: int | None
    """Free bytes of /dev/shm; None where there is none (macOS)."""
    gpus: tuple[Gpu, ...]
    gpu_note: str
    """Why no GPU is listed; empty when some are."""
    gpu_links: tuple[GpuLink, ...] = ()
    """What joins each pair of them."""

    @property
    def backend(self) -> str:
        return "cuda" if self.gpus else "cpu"


def usable_cores() -> int:
    """Cores that this process may run on (a container's or taskset's share), not those that the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def find_gpus() -> tuple[tuple[Gpu, ...], str]:
    """The CUDA devices, and if there are none, why."""
    try:
        import pynvml
    except ImportError:
        return (), "nvidia-ml-py is not installed (pip install 'labkit[gpu]'), so GPUs were not looked for"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), f"NVML did not start: {error}"
    try:
        return tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())), ""
    finally:
        pynvml.nvmlShutdown()


def find_gpu_links(num_gpus: int) -> tuple[GpuLink, ...]:
    """What joins the GPUs that `find_gpus` found; nothing for fewer than two."""
    if num_gpus < 2:
        return ()
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # what NVML's module raises cannot be named where it is not there
        return ()
    try:
        return gpu_links(pynvml, num_gpus)
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _gpu(pynvml, index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    name = pynvml.nvmlDeviceGetName(handle)
    name = name.decode() if isinstance(name, bytes) else name
    return Gpu(index, name, pynvml.nvmlDeviceGetMemoryInfo(handle).total, numa_node(pynvml, handle))


def numa_nodes() -> dict[int, tuple[int, ...]]:
    """Cores of each NUMA node that this process may run on; one node 0 where the system does not tell."""
    allowed = set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(usable_cores()))
    found = {}
    for folder in Path("/sys/devices/system/node").glob("node[0-9]*"):
        cores = tuple(sorted(allowed & set(_core_list((folder / "cpulist").read_text()))))
        if cores:
            found[int(folder.name.removeprefix("node"))] = cores
    return dict(sorted(found.items())) or {0: tuple(sorted(allowed))}


def _core_list(text: str) -> list[int]:
    """0-3,8 → 0, 1, 2, 3, 8."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def cores_of(pid: int) -> tuple[int, ...] | None:
    """Cores that a process may run on; None where the system does not tell, or it has gone."""
    try:
        return tuple(sorted(psutil.Process(pid).cpu_affinity()))
    except (psutil.Error, AttributeError, OSError):
        return None


def look_at_machine() -> Machine:
    memory = psutil.virtual_memory()
    shm = Path("/dev/shm")
    gpus, note = find_gpus()
    return Machine(
        host=socket.gethostname(),
        num_cores=usable_cores(),
        memory_bytes=memory.total,
        available_bytes=memory.available,
        shm_bytes=shutil.disk_usage(shm).free if shm.is_dir() else None,
        gpus=gpus,
        gpu_note=note,
        gpu_links=find_gpu_links(len(gpus)),
    )


def default_num_ranks(machine: Machine) -> int:
    """One rank a GPU; on CPUs four (so that DP2xTP2 exists), or two where memory is short of 1 GiB a rank."""
    if machine.gpus:
        return len(machine.gpus)
    return 4 if machine.available_bytes > 6 * 2**30 else 2


def default_threads(num_cores: int, num_ranks: int) -> int:
    """The same explicit number in every arm of a comparison: the cores shared out over all ranks of the pool."""
    return max(1, num_cores // num_ranks)
