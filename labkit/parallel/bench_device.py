"""Copies and matrix products on one rank's device: how long, and is the result right.

Timed products are of random numbers, since a device that multiplies zeros or patterns draws less power and clocks
higher; what is checked is a product of small whole numbers, which is exact in every dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from labkit.engine.bench_messages import BenchDevice, DeviceBenched
from labkit.measure.device import WORK
from labkit.parallel.comm import Group
from labkit.parallel.rounds import timed_rounds

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LEAST_BYTES, _CACHES = {"cpu": 128 * 2**20, "cuda": 2**30}, 4
"""A buffer is at least so large, and so many times the last cache."""
_PERIOD = 5


def bench_device(message: BenchDevice, rank: int, group: Group | None, device: torch.device) -> DeviceBenched:
    """This rank's part. group: of all ranks, so that those that work together begin each round together."""
    if message.what not in WORK:
        raise ValueError(f"{message.what!r} is no work that is measured here; there are {', '.join(WORK)}.")
    cache = cache_bytes(device)
    if group is None or rank not in message.ranks:
        return DeviceBenched(message.epoch, rank, [], 0, message.size, cache)
    size = message.size or max(_LEAST_BYTES[device.type], _CACHES * cache)
    prepare = _copy if message.what == "copy" else _product
    run, check = prepare(size, _DTYPES[message.dtype], device)
    num_wrong = check() if message.check else 0
    meet = group.barrier if len(message.ranks) == group.size else lambda: None
    times = timed_rounds(run, meet, message.num_warmup, message.num_rounds, device)
    return DeviceBenched(message.epoch, rank, times, num_wrong, size, cache)


def cache_bytes(device: torch.device) -> int:
    """The last cache before the device's memory; 0 where the system does not tell."""
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    texts = [path.read_text().strip() for path in sizes]
    return max((int(text[:-1]) * units[text[-1]] for text in texts if text[-1:] in units), default=0)


def _copy(num_bytes: int, dtype: torch.dtype, device: torch.device) -> tuple[Callable[[], object], Callable[[], int]]:
    given = (torch.arange(max(1, num_bytes // dtype.itemsize), device=device) % _PERIOD).to(dtype)
    out = torch.zeros_like(given)

    def check() -> int:
        out.copy_(given)
        return int((out != given).sum())

    return lambda: out.copy_(given), check


def _product(side: int, dtype: torch.dtype, device: torch.device) -> tuple[Callable[[], object], Callable[[], int]]:
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out), lambda: _num_wrong(side, dtype, device)


def _num_wrong(side: int, dtype: torch.dtype, device: torch.device) -> int:
    """Of a product whose element (i, j) is k · (i mod 5 + 1) · (j mod 5 + 1): k ≤ 8 of its summands, spread evenly, are
    not zero, so that no dtype rounds it."""
    places: Tensor = torch.arange(side, device=device)
    factors = (places % _PERIOD + 1).float()
    ones = torch.zeros(side, device=device)
    ones[torch.arange(8, device=device) * side // 8] = 1.0
    left = (factors[:, None] * ones[None, :]).to(dtype)
    right = (ones[:, None] * factors[None, :]).to(dtype)
    expected = factors[:, None] * factors[None, :] * ones.sum()
    return int((torch.mm(left, right).float() != expected).sum())
