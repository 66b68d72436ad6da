"""Seeded random weights that no rank ever makes whole: each row of each tensor is a window of one bank of
normals.

A row's place in the bank is hashed from (seed, tensor name, row), so any slice of any tensor is a copy of
memory, every way of cutting a model yields the same weights, and thirty million of them take some hundredths
of a second. Rows of one tensor never start at the same place. Sizes keep activations near one: 1/√fan_in for
a projection, divided by √(2 · layers) where it adds to the residual stream (Radford et al. 2019), 0.02 for
embeddings and biases, norms at 1.
"""

from __future__ import annotations

import functools
import hashlib
import math

import torch
from torch import Tensor

from labkit.layout import WeightSlice
from labkit.model.spec import ModelSpec

BANK_BITS = 20
BANK_SIZE = 1 << BANK_BITS
EMBEDDING_STD = 0.02


@functools.lru_cache(maxsize=2)
def _bank(seed: int, margin: int) -> Tensor:
    """float32 [BANK_SIZE + margin] standard normals; the margin repeats the start, so that windows may run
    over.
    """
    normals = torch.randn(BANK_SIZE, generator=torch.Generator().manual_seed(seed))
    return torch.cat([normals, normals.repeat(-(-margin // BANK_SIZE))[:margin]])


def row_offsets(seed: int, name: str, start: int, stop: int) -> Tensor:
    """int64 [stop - start]: where rows start..stop of the tensor begin in the bank; a permutation of the row
    number.
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=12).digest()
    flip, step, turn = (int.from_bytes(digest[i : i + 4], "little") for i in (0, 4, 8))
    mask = BANK_SIZE - 1
    rows = torch.arange(start, stop, dtype=torch.int64) ^ (flip & mask)
    rows = (rows * (step | 1)) & mask
    rows ^= rows >> 9
    rows = (rows * (turn | 1)) & mask
    return rows ^ (rows >> 11)


def initial_std(name: str, shape: tuple[int, ...], num_layers: int) -> float:
    """Standard deviation of a tensor by its Hugging Face name; 0 means all ones (a norm's scale)."""
    if "norm" in name:
        return 0.0
    if len(shape) == 1 or name.endswith("embed_tokens.weight"):
        return EMBEDDING_STD
    std = 1.0 / math.sqrt(shape[-1])
    adds_to_residual = name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight"))
    return std / math.sqrt(2 * num_layers) if adds_to_residual else std


class RandomSource:
    """Reads slices of weights that exist nowhere: the same model and seed give the same numbers under every
    layout.
    """

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self.num_layers, self.seed = spec.num_layers, seed
        self._banks: dict[tuple[float, torch.dtype, str], Tensor] = {}
        self._margin = max(spec.hidden_size, spec.num_heads * spec.head_dim, spec.intermediate_size) * 2

    def read(self, name: str, piece: WeightSlice, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The slice, without padding, as a new tensor of `dtype` on `device`."""
        shape = tuple(piece.shape)
        std = initial_std(name, shape, self.num_layers)
        window = [(0, size) for size in shape]
        if piece.dim is not None:
            window[piece.dim] = (piece.start, piece.stop)
        if std == 0.0:
            return torch.ones([high - low for low, high in window], dtype=dtype, device=device)
        rows = window[0] if len(shape) > 1 else (0, 1)
        return self._windows(name, std, rows, window[-1], dtype, device).view([h - lo for lo, h in window])

    def _windows(
        self,
        name: str,
        std: float,
        rows: tuple[int, int],
        columns: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        width = columns[1] - columns[0]
        bank = self._scaled_bank(std, dtype, device)
        if columns[1] > len(bank) - BANK_SIZE:
            raise ValueError(f"{name} has rows of {columns[1]} numbers; random weights stop at {self._margin}.")
        starts = row_offsets(self.seed, name, *rows) + columns[0]
        return bank.unfold(0, width, 1).index_select(0, starts.to(device))

    def _scaled_bank(self, std: float, dtype: torch.dtype, device: torch.device) -> Tensor:
        key = (std, dtype, str(device))
        if key not in self._banks:
            self._banks[key] = (_bank(self.seed, self._margin) * std).to(device=device, dtype=dtype)
        return self._banks[key]
