"""Root-mean-square norm: x · g / sqrt(mean(x²) + ε), over the last dimension (Zhang & Sennrich 2019)."""

from __future__ import annotations

import torch
from torch import Tensor


class RmsNorm:
    """Scale `weight` [size] and `eps`; every rank of a tensor-parallel group holds the whole of it."""

    __slots__ = ("eps", "shape", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.shape = (weight.shape[0],)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return torch.rms_norm(x, self.shape, self.weight, self.eps)
