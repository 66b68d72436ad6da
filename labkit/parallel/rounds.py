"""Something over and over, each time on the clock: warm-up apart, and on CUDA only when the device has done it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def timed_rounds(
    run: Callable[[], object], prepare: Callable[[], object], num_warmup: int, num_rounds: int, device: torch.device
) -> list[int]:
    """Nanoseconds of each measured `run`; `prepare` goes before every one, off the clock."""
    times = []
    for round_ in range(num_warmup + num_rounds):
        prepare()
        wait_for(device)
        began = time.monotonic_ns()
        run()
        wait_for(device)
        if round_ >= num_warmup:
            times.append(time.monotonic_ns() - began)
    return times


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
