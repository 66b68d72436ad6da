"""What an engine's standing memory depends on besides bytes: how many threads a GPU keeps resident, and what joins it.

A kernel that spills registers needs its stack for every thread that may be resident, and the driver sets that aside
once: bytes a thread × threads a multiprocessor × multiprocessors. vLLM's top-k/top-p kernel (Triton) spills everywhere;
its stack stands here as ptxas reports it for the source of vLLM 0.19 compiled by Triton 3.6 for each architecture.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Chip:
    """Counts of the datasheets; `sampler_stack`: bytes a thread, from ptxas."""

    name: str
    num_multiprocessors: int
    threads_each: int
    sampler_stack: int
    cublas_workspace: int
    """What PyTorch gives cuBLAS (CUDAContextLight: 32 MiB from compute capability 9.0 on, else 8.125 MiB)."""
    nvswitch: bool
    split_attention: bool = False
    """Whether FlashAttention 3 runs, which keeps partial results of its splits inside CUDA graphs."""

    @property
    def local_memory(self) -> int:
        return self.sampler_stack * self.threads_each * self.num_multiprocessors


_SMALL, _LARGE = int(8.125 * MIB), 32 * MIB
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("a100", 108, 2048, 1008, _SMALL, nvswitch=True),
        Chip("a100-pcie", 108, 2048, 1008, _SMALL, nvswitch=False),
        Chip("h100", 132, 2048, 768, _LARGE, nvswitch=True, split_attention=True),
        Chip("h200", 132, 2048, 768, _LARGE, nvswitch=True, split_attention=True),
        Chip("b200", 148, 2048, 760, _LARGE, nvswitch=True),
        Chip("l40s", 142, 1536, 840, _SMALL, nvswitch=False),
        Chip("rtx4090", 128, 1536, 840, _SMALL, nvswitch=False),
        Chip("rtxpro6000", 188, 1536, 1112, _LARGE, nvswitch=False),
    )
}
HOPPER = CHIPS["h100"]


def chip_of(name: str) -> Chip:
    """By the name of a device in data/hardware; a GPU that is not listed counts as a Hopper: it differs by less than
    a quarter of a GiB.
    """
    return CHIPS.get(name, HOPPER)
