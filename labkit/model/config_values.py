"""Reading single keys of a config.json: what is missing or of the wrong kind is a sentence that names the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MOST, MOST_LAYERS = 1 << 31, 4096
"""Above any published model; so that a slip of the hand is a sentence, and not hours of counting."""


class ConfigError(ValueError):
    """The config cannot be read as a model; the message says which key and what to do."""


Config = Mapping[str, Any]


def need(config: Config, *keys: str) -> Any:
    """The first of `keys` that the config has (and is not null)."""
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise ConfigError(
        f"config.json lacks {' or '.join(keys)}; add it as the checkpoint's authors published it."
    )


def need_count(config: Config, *keys: str, most: int = MOST) -> int:
    value = need(config, *keys)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        given = str(value) if isinstance(value, int) else repr(value)
        raise ConfigError(f"config.json: {keys[0]} is {given[:40]}; it must be a whole number from 1 to {most:,}.")
    return value


def count_or(config: Config, key: str, usual: int = 0) -> int:
    """A count that may be missing, null or 0."""
    return need_count(config, key) if config.get(key) else usual


def need_number(config: Config, *keys: str) -> float:
    value = need(config, *keys)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"config.json: {keys[0]} is {str(value)[:40]!r}; it must be a number above 0.")
    return float(value)


def need_switch(config: Config, key: str) -> bool:
    value = need(config, key)
    if not isinstance(value, bool):
        raise ConfigError(f"config.json: {key} is {value!r}; it must be true or false.")
    return value
