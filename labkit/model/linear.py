"""A linear layer keeps one copy of its weight, laid out as this machine multiplies it fastest, and cuts along
one side.

On a CPU that is oneDNN's blocked layout, read at the memory's full rate whatever the batch; the calls are
private to torch, so they stand behind `multiply` alone, are tried once against plain arithmetic before they
are trusted, and give way to F.linear where they are missing. Columns split: each rank computes its own
outputs, nothing crosses. Rows split: each rank has a share of every output, one all-reduce adds them, and the
bias is added once, after it (Megatron-LM, 2019).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from labkit.parallel.sequence import ResidualStream

PACKED_ROWS = 64
"""Batch that oneDNN is told to lay the weight out for: good from 1 row to hundreds."""


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)


@functools.cache
def least_rows() -> int:
    """Rows that a packed product is padded to: oneDNN's AVX-512 kernels stream weights faster for 4."""
    return 4 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """x Wᵀ (+ bias) (+ residual), `weight` packed or plain. The one way to the private calls."""
    if not weight.is_mkldnn:
        product = F.linear(x, weight, bias)
        return product if residual is None else product.add_(residual)
    num_rows = len(x)
    if num_rows < least_rows():
        missing = (0, 0, 0, least_rows() - num_rows)
        padded = None if residual is None else F.pad(residual, missing)
        return _packed_product(F.pad(x, missing), weight, bias, padded)[:num_rows]
    return _packed_product(x, weight, bias, residual)


def _packed_product(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    if residual is None:
        return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return torch.ops.mkldnn._linear_pointwise.binary(x, residual, weight, bias, "add")


@functools.cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether this torch on this CPU multiplies by packed weights of `dtype`, and rightly."""
    generator = torch.Generator().manual_seed(0)
    weight, x, residual = (torch.randn(n, 32, generator=generator) for n in (32, 3, 3))
    bias = torch.randn(32, generator=generator)
    weight, x, residual, bias = (t.to(dtype) for t in (weight, x, residual, bias))
    try:
        got = multiply(x, _pack(weight), bias, residual)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    want = F.linear(x.float(), weight.float(), bias.float()) + residual.float()
    return torch.allclose(got.float(), want, atol=1e-4 if dtype == torch.float32 else 0.3)


class Linear:
    """y = x Wᵀ + b with W [out_features, in_features]: this rank's rows of a column-parallel layer, or a
    whole one.

    The weight given is not kept when it can be packed, so the caller must not hold on to it either.
    """

    __slots__ = ("bias", "in_features", "num_bytes", "out_features", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, pack: bool = True) -> None:
        self.out_features, self.in_features = weight.shape
        self.num_bytes = weight.nbytes + (bias.nbytes if bias is not None else 0)
        packs = pack and weight.device.type == "cpu" and packing_works(weight.dtype)
        self.weight = _pack(weight) if packs else weight.contiguous()
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight, self.bias)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """x Wᵀ + b + residual, in one pass where the machine can."""
        return multiply(x, self.weight, self.bias, residual)


class RowParallel:
    """This rank's columns of W and its share of x; the shares are summed over the stream's group, then the bias is
    added once.
    """

    __slots__ = ("bias", "linear", "stream")

    def __init__(self, weight: Tensor, bias: Tensor | None, stream: ResidualStream, pack: bool = True) -> None:
        self.stream = stream
        whole = stream.group.size == 1
        self.linear = Linear(weight, bias if whole else None, pack)
        self.bias = None if whole else bias

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """Σ over ranks of x Wᵀ, + b + residual, of the rows that the stream holds; x [tokens, in_features of this
        rank].
        """
        if self.stream.group.size == 1:
            return self.linear.plus(x, residual)
        total = self.stream.summed(self.linear(x))
        if self.bias is not None:
            total = total + self.bias
        return total.add_(residual)

    @property
    def num_bytes(self) -> int:
        return self.linear.num_bytes + (self.bias.nbytes if self.bias is not None else 0)
