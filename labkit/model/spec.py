"""The door to models as shapes: find a config.json by name or path, read it, and count.

`load_spec("lab-30m")` reads `data/models/lab-30m/config.json`; a folder, the path of a config.json and the
Hugging Face name of a model with known shapes work as well. No torch in here or below: the planner, the scheduler and
the pages ask a `ModelSpec` freely.
"""

from __future__ import annotations

import difflib
import json
from functools import lru_cache
from pathlib import Path

from labkit.model.aliases import find_alias
from labkit.model.config import ConfigError, parse_config
from labkit.model.counts import visible_pairs
from labkit.model.precision import with_precision
from labkit.model.shapes import (
    DTYPE_BYTES,
    LinearAttention,
    MlaSpec,
    ModelSpec,
    MoeSpec,
    Quantization,
    Rope,
    RopeScaling,
)
from labkit.paths import data_dir

__all__ = [
    "DTYPE_BYTES",
    "ConfigError",
    "LinearAttention",
    "MlaSpec",
    "ModelSpec",
    "MoeSpec",
    "Quantization",
    "Rope",
    "RopeScaling",
    "list_models",
    "load_spec",
    "model_dir",
    "parse_config",
    "visible_pairs",
    "with_precision",
]


def _models_dir() -> Path:
    return data_dir() / "models"


def list_models() -> list[str]:
    """Names under data/models, sorted."""
    return sorted(path.parent.name for path in _models_dir().glob("*/config.json"))


def model_dir(name_or_path: str | Path) -> Path:
    """The folder of a model: a name under data/models, a folder with a config.json, the path of a config.json, or a
    name that `labkit.model.aliases` knows ("deepseek-ai/DeepSeek-R1").

    Raises FileNotFoundError with the names nearest to it when there is no such model.
    """
    path = Path(name_or_path).expanduser()
    if path.name == "config.json" and path.is_file():
        return path.parent.resolve()
    if (path / "config.json").is_file():
        return path.resolve()
    named = _models_dir() / str(name_or_path)
    if (named / "config.json").is_file():
        return named
    if alias := find_alias(str(name_or_path), list_models()):
        return _models_dir() / alias.folder
    raise FileNotFoundError(_not_found(str(name_or_path)))


def _not_found(given: str) -> str:
    known = list_models()
    close = difflib.get_close_matches(given.rpartition("/")[2].lower(), known, n=3)
    near = f" Did you mean {' or '.join(close)}?" if close else ""
    return (
        f"There is no model {given!r}.{near} Give a folder with a config.json, the path of one, or one of the "
        f"{len(known)} names that are listed in {_models_dir()}."
    )


def load_spec(name_or_path: str | Path) -> ModelSpec:
    """Read a model's config; a name that says its precision ("nvidia/Llama-3.1-8B-Instruct-FP8") gets it.

    Raises FileNotFoundError or ConfigError (a ValueError) with a sentence.
    """
    given = Path(name_or_path).expanduser()
    if given.suffix == ".json" and given.name != "config.json" and given.is_file():  # saved under a name of its own
        return _load(given, given.stat().st_mtime_ns)
    folder = model_dir(name_or_path)
    file = folder / "config.json"
    spec = _load(file, file.stat().st_mtime_ns)
    alias = None
    if folder.parent == _models_dir() and folder.name != str(name_or_path):
        alias = find_alias(str(name_or_path), [folder.name])
    return with_precision(spec, alias.precision) if alias else spec


@lru_cache(maxsize=64)
def _load(file: Path, mtime_ns: int) -> ModelSpec:
    try:
        config = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}.") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file} must hold a JSON object, as Hugging Face's config.json does.")
    return parse_config(config, file.parent.name if file.name == "config.json" else file.stem)
