"""The experts of one layer on one rank, as products over groups of rows: row i belongs to the expert whose group
it stands in.

On CUDA all of them are one grouped product, whose group sizes stay on the device, so nothing waits for them.
On a CPU each expert is a packed linear layer that is called when it has rows: a decode step reads the weights
of the experts that were picked, and no others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.model.checkpoint import Weights
from labkit.model.linear import Linear

Names = tuple[str, str, str]
"""An expert's gate, up and down in the checkpoint."""


class Experts(Protocol):
    num_bytes: int

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows [N, H], expert after expert; counts int64 [experts here], sum N → [N, H]."""
        ...


def make_experts(weights: Weights, names: Sequence[Names]) -> Experts:
    """The experts named, in that order."""
    return (LoopedExperts if weights.device.type == "cpu" else GroupedExperts)(weights, names)


class LoopedExperts:
    def __init__(self, weights: Weights, names: Sequence[Names]) -> None:
        self.pairs = [
            (Linear(torch.cat([weights[gate], weights[up]])), Linear(weights[down])) for gate, up, down in names
        ]
        self.num_bytes = sum(gate_up.num_bytes + down.num_bytes for gate_up, down in self.pairs)

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        parts, at = [], 0
        for (gate_up, down), count in zip(self.pairs, counts.tolist(), strict=True):
            if count:
                parts.append(down(_gated(gate_up(rows[at : at + count]))))
                at += count
        return torch.cat(parts) if parts else torch.empty_like(rows)


class GroupedExperts:
    """Weights stacked: gate and up [E, 2I, H], down [E, H, I]."""

    def __init__(self, weights: Weights, names: Sequence[Names]) -> None:
        both = [torch.cat([weights[gate], weights[up]]) for gate, up, _ in names]
        self.gate_up = torch.stack(both)
        self.down = torch.stack([weights[down] for _, _, down in names])
        self.num_bytes = self.gate_up.nbytes + self.down.nbytes

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        ends = torch.cumsum(counts, 0).to(torch.int32)
        return grouped_product(_gated(grouped_product(rows, self.gate_up, ends)), self.down, ends)


def _gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """rows [N, I], weights [E, O, I], ends int32 [E] (where each group of rows ends) → [N, O]."""
    if len(rows) and grouping_works(rows.dtype, rows.device, weights.shape[1], weights.shape[2]):
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    return _looped_product(rows, weights, ends)


def _looped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    out = rows.new_empty(len(rows), weights.shape[1])
    start = 0
    for weight, end in zip(weights, ends.tolist(), strict=True):
        if end > start:
            out[start:end] = F.linear(rows[start:end], weight)
        start = end
    return out


@functools.cache
def grouping_works(dtype: torch.dtype, device: torch.device, num_out: int, num_in: int) -> bool:
    """Whether this torch and this device have a grouped product for such weights, and a right one.

    Devices differ in which dtypes and row lengths they take (16 bytes is the unit); one small trial says.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, num_in, generator=generator).to(device, dtype)
    weights = torch.randn(3, num_out, num_in, generator=generator).to(device, dtype)
    ends = torch.tensor([2, 2, 5], dtype=torch.int32, device=device)
    try:
        got = F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    except (RuntimeError, AttributeError, NotImplementedError, ValueError):
        return False
    want = _looped_product(rows.float(), weights.float(), ends)
    tolerance = 1e-4 if dtype == torch.float32 else 0.02
    return torch.allclose(got.float(), want, rtol=tolerance, atol=tolerance * num_in**0.5)
