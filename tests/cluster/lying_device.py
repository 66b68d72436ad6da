"""A rank whose copies miss their last element, as a broken memory's would."""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor

from labkit.engine.bench_worker import BenchRunner
from labkit.engine.worker import serve

_honest = Tensor.copy_


def _lie(self: Tensor, source: Tensor) -> Tensor:
    return _honest(self[:-1], source[:-1]) if self.dim() == 1 and self.numel() > 1000 else _honest(self, source)


if __name__ == "__main__":
    torch.Tensor.copy_ = _lie  # type: ignore[assignment, method-assign]
    status = serve(BenchRunner)
    sys.stdout.flush()
    os._exit(status)
