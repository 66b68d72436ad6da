"""When a step began and ended on its device, told on the host's monotonic clock."""

from __future__ import annotations

import time

import torch


class HostClock:
    """The host's clock: on a CPU a step is over when its calls have returned."""

    def __init__(self, start_ns: int) -> None:
        self.start_ns = start_ns

    def read(self) -> tuple[int, int]:
        return self.start_ns, time.monotonic_ns()


class CudaClock:
    """The device's own start and end of a step, put on the host's clock when it is over."""

    def __init__(self) -> None:
        self.begin = torch.cuda.Event(enable_timing=True)
        self.begin.record()

    def read(self) -> tuple[int, int]:
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        end.synchronize()
        end_ns = time.monotonic_ns()
        return end_ns - int(self.begin.elapsed_time(end) * 1e6), end_ns
