"""Weights by slice: a rank reads from the memory-mapped checkpoint what it owns, and nothing else.

What it owns is `weight_slices`' to say; where the numbers come from is a source's: safetensors when the
folder has them, seeded random numbers when it has only a config. `Weights` puts the two together, pads what
the layout pads, joins the parts of fused layers after each was cut (cut as one block, rank 0 would get all of
the gate), and counts the bytes.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from labkit.layout import WeightSlice
from labkit.model.random_weights import RandomSource
from labkit.model.spec import ModelSpec

INDEX_FILE = "model.safetensors.index.json"


class WeightSource(Protocol):
    def read(self, name: str, piece: WeightSlice, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The slice, without padding, as a tensor of `dtype` on `device`."""
        ...


class CheckpointError(ValueError):
    """The checkpoint lacks a tensor, or has it in another shape than its config says."""


class CheckpointSource:
    """The safetensors files of one folder, opened once and mapped: a slice's pages are all that is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of = _tensor_files(folder)
        self._open: dict[str, Any] = {}

    def read(self, name: str, piece: WeightSlice, dtype: torch.dtype, device: torch.device) -> Tensor:
        if name not in self._file_of:
            raise CheckpointError(
                f"{self.folder} has no tensor {name}, which its config.json needs ({list(piece.shape)}). "
                "Use the checkpoint's own config, or remove the safetensors to serve random weights."
            )
        view = self._handle(self._file_of[name]).get_slice(name)
        shape = tuple(view.get_shape())
        if shape != tuple(piece.shape):
            raise CheckpointError(
                f"{name} in {self.folder} has shape {list(shape)}; its config.json says {list(piece.shape)}. "
                "Use the config that belongs to this checkpoint."
            )
        where = [slice(None)] * len(shape)
        if piece.dim is not None:
            where[piece.dim] = slice(piece.start, piece.stop)
        return view[tuple(where)].to(device=device, dtype=dtype)

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, framework="pt").__enter__()
        return self._open[file]


def _tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name → file name, from the index when the checkpoint is in shards."""
    if (folder / INDEX_FILE).exists():
        return dict(json.loads((folder / INDEX_FILE).read_text())["weight_map"])
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            found.update(dict.fromkeys(tensors.keys(), path.name))
    return found


def open_source(folder: Path, spec: ModelSpec, seed: int) -> WeightSource:
    """The folder's safetensors, or random weights by `seed` when it has none."""
    has_tensors = folder.is_dir() and any(folder.glob("*.safetensors"))
    return CheckpointSource(folder) if has_tensors else RandomSource(spec, seed)


class Weights:
    """One rank's share of one model, handed out tensor by tensor as [slice] of `dtype` on `device`."""

    def __init__(
        self,
        source: WeightSource,
        slices: dict[str, WeightSlice],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.source, self.slices, self.dtype, self.device = source, slices, dtype, device

    def __contains__(self, name: str) -> bool:
        return name in self.slices

    def __getitem__(self, name: str) -> Tensor:
        piece = self.slices[name]
        tensor = self.source.read(name, piece, self.dtype, self.device)
        return tensor if piece.pad_to is None else _padded(tensor, piece.dim or 0, piece.pad_to)

    def get(self, name: str) -> Tensor | None:
        return self[name] if name in self.slices else None


def _padded(tensor: Tensor, dim: int, size: int) -> Tensor:
    """`tensor` with zeros behind it along `dim`, up to `size`."""
    missing = size - tensor.shape[dim]
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def joined(parts: list[Tensor | None]) -> Tensor | None:
    """The parts of a fused layer one after another, each cut for this rank; None if there are none."""
    present = [part for part in parts if part is not None]
    if not present:
        return None
    return torch.cat(present)


def slice_bytes(slices: dict[str, WeightSlice], dtype: torch.dtype) -> dict[str, int]:
    """Bytes of a rank's weights by part, before any of them is read."""
    total: Counter[str] = Counter()
    for piece in slices.values():
        total[piece.part] += piece.num_elements * dtype.itemsize
    return dict(total)
