"""Writes a model that has only a config as a Hugging Face checkpoint, with the very weights that the ranks
make up.

So vLLM and transformers can be run on the same numbers: safetensors in shards, config.json, and byte-level
tokenizer files. Each tensor is made whole only while its shard is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from labkit.layout import Layout, WeightSlice, weight_slices
from labkit.model.checkpoint import INDEX_FILE
from labkit.model.random_weights import RandomSource
from labkit.model.spec import load_spec, model_dir
from labkit.model.tokenizer_files import write_tokenizer

SHARD_BYTES = 2 * 1024**3


def export_checkpoint(
    model: str | Path, folder: str | Path, seed: int = 0, dtype: str = "float32", shard_bytes: int = SHARD_BYTES
) -> Path:
    """Writes the random weights of `model` (a name or path) by `seed` into `folder`, and gives its path.

    Raises ValueError when the folder already has safetensors or the config's vocabulary is too small for
    bytes.
    """
    path, spec = Path(folder), load_spec(model)
    if path.is_dir() and any(path.glob("*.safetensors")):
        raise ValueError(f"{path} already holds safetensors; choose an empty folder, so that nothing is mixed.")
    path.mkdir(parents=True, exist_ok=True)
    write_tokenizer(path, spec.vocab_size)
    config = json.loads((model_dir(model) / "config.json").read_text(encoding="utf-8"))
    config.pop("dtype", None)
    config["torch_dtype"] = dtype
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    slices = weight_slices(Layout(), spec, 0)
    _write_shards(path, slices, RandomSource(spec, seed), getattr(torch, dtype), shard_bytes)
    return path


def _write_shards(
    folder: Path, slices: dict[str, WeightSlice], source: RandomSource, dtype: torch.dtype, shard_bytes: int
) -> None:
    shards = list(_shards(slices, dtype.itemsize, shard_bytes))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        tensors: dict[str, Tensor] = {
            name: source.read(name, slices[name], dtype, torch.device("cpu")).contiguous() for name in names
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(slices: dict[str, WeightSlice], itemsize: int, shard_bytes: int) -> Iterator[list[str]]:
    """Names in order, in lists of at most `shard_bytes` (a larger tensor has one to itself)."""
    names: list[str] = []
    size = 0
    for name, piece in slices.items():
        tensor_bytes = piece.num_elements * itemsize
        if names and size + tensor_bytes > shard_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor_bytes
    yield names
