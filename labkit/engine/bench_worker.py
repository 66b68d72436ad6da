"""A rank without a model, for measuring the machine: it takes a layout's groups and repeats collectives, or copies and
products on its own device."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch

from labkit.engine.bench_messages import Bench, BenchDevice, Benched, DeviceBenched
from labkit.engine.messages import AllocateKV, Configure, Configured, Memory, Moved, MoveKV, Ready, Sampled, Step
from labkit.engine.worker import serve
from labkit.parallel.bench import bench
from labkit.parallel.mesh import Mesh


class BenchRunner:
    def __init__(self, rank: int, mesh_factory: Callable[[Configure], Mesh], device: torch.device) -> None:
        self._rank, self._mesh_factory, self._device = rank, mesh_factory, device
        self._mesh: Mesh | None = None

    def configure(self, message: Configure) -> Configured:
        self._mesh = self._mesh_factory(message)
        return Configured(message.epoch, self._rank, 0, 0, Memory(), 0.0, 0.0)

    def bench(self, message: Bench | BenchDevice) -> Benched | DeviceBenched:
        if self._mesh is None:
            raise RuntimeError(f"rank {self._rank} has no layout: it must be configured before it measures")
        return bench(message, self._rank, self._mesh, self._device)

    def allocate(self, message: AllocateKV) -> Ready:
        raise RuntimeError("this rank measures the machine; it has no model and no cache")

    def step(self, message: Step) -> tuple[Sampled | None, int, int]:
        raise RuntimeError("this rank measures the machine; it has no model to step")

    def move(self, message: MoveKV) -> None:
        raise RuntimeError("this rank measures the machine; it has no cache to hand over")

    def moved(self) -> list[Moved]:
        return []


if __name__ == "__main__":
    status = serve(BenchRunner)
    sys.stdout.flush()
    os._exit(status)
