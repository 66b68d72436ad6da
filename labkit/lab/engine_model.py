"""The model that another engine is given: a checkpoint that is there, one of ours written out first, or a name.

A model of ours that is only a config is written once as a checkpoint, with the very weights that our ranks make up, so
that both engines serve the same numbers.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from labkit.cluster.engines import OnLine
from labkit.layout import Layout, require_legal
from labkit.model.spec import load_spec, model_dir
from labkit.paths import home_dir

DEFAULT_MODEL = "lab-30m"
_UNKNOWN_VOCAB = 2048
"""Token ids below this exist in about every model."""


@dataclass(frozen=True)
class ServedModel:
    """A model as an engine gets it, and as much as is known of it."""

    name: str
    path: str
    vocab_size: int
    has_experts: bool = False


def serve_model(model: str, layout: Layout, on_line: OnLine | None = None) -> ServedModel:
    """What to give an engine for `model`: a folder with weights, a name under data/models, or a name of its own.

    A name with a slash that is no path here (such as Qwen/Qwen3-0.6B) is left to the engine to find. Raises
    FileNotFoundError, ValueError or LayoutError with a sentence.
    """
    model = model or DEFAULT_MODEL
    try:
        folder = model_dir(model)
    except FileNotFoundError:
        if "/" in model and not model.startswith(("/", ".", "~")):
            return ServedModel(model, model, _UNKNOWN_VOCAB)
        raise
    has_weights = any(folder.glob("*.safetensors"))
    try:
        spec = load_spec(folder)
    except ValueError:
        if not has_weights:
            raise
        return ServedModel(folder.name, str(folder), _vocab_in(folder))  # a family that we do not know
    require_legal(layout, spec)
    path = folder if has_weights else _exported(model, folder.name, on_line)
    return ServedModel(folder.name, str(path), spec.vocab_size, spec.moe is not None)


def _vocab_in(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return int(config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or _UNKNOWN_VOCAB)


def _exported(model: str, name: str, on_line: OnLine | None, seed: int = 0) -> Path:
    """Random weights by `seed`, as `labkit serve` makes them, in a folder that is whole or not there."""
    target = home_dir() / "checkpoints" / f"{name}-seed{seed}-float32"
    if (target / "config.json").exists():
        return target
    if on_line is not None:
        on_line(0.0, f"writing the random weights of {name} to {target}")
    begun = target.with_name(target.name + ".begun")
    shutil.rmtree(begun, ignore_errors=True)
    words = [sys.executable, "-m", "labkit.cli", "export-model", model, str(begun), "--seed", str(seed)]
    made = subprocess.run(words, capture_output=True, text=True)  # torch stays in that process
    if made.returncode:
        raise ValueError(f"The weights of {name} could not be written: {made.stderr.strip()}")
    begun.rename(target)
    return target
