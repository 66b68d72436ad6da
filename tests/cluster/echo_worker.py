"""A rank with the real loop, sockets and collectives, and a runner that only adds up: `python -m` this
under torchrun.

A step sums its first token id over the tensor-parallel group; the first rank answers with the sum.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np
import torch

from labkit.engine.messages import AllocateKV, Configure, Configured, Memory, Ready, Sampled, Step
from labkit.engine.worker import serve
from labkit.parallel.mesh import Mesh, MeshFactory


class Adder:
    def __init__(self, rank: int, mesh_factory: MeshFactory, device: torch.device) -> None:
        self.rank, self.mesh_factory = rank, mesh_factory
        self.mesh: Mesh | None = None

    def configure(self, message: Configure) -> Configured:
        self.mesh = self.mesh_factory(message)
        return Configured(message.epoch, self.rank, 8, 64, Memory(), 0.0, 0.0)

    def allocate(self, message: AllocateKV) -> Ready:
        return Ready(message.epoch, self.rank, Memory(), 0.0)

    def step(self, message: Step) -> tuple[Sampled | None, int, int]:
        assert self.mesh is not None
        began = time.monotonic_ns()
        x = torch.from_numpy(np.frombuffer(message.token_ids, np.int32).astype(np.float32))
        total = int(self.mesh.tp.all_reduce(x)[0])
        ended = time.monotonic_ns()
        if self.rank != 0:
            return None, began, ended
        return Sampled(message.epoch, message.step_id, [total], None, began, ended), began, ended


if __name__ == "__main__":
    status = serve(Adder)
    sys.stdout.flush()
    os._exit(status)
