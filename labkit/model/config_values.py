"""Reading single keys of a config.json: what is missing or of the wrong kind is a sentence that names the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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


def need_count(config: Config, *keys: str) -> int:
    value = need(config, *keys)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {keys[0]} is {value!r}; it must be a whole number from 1 on.")
    return value


def need_switch(config: Config, key: str) -> bool:
    value = need(config, key)
    if not isinstance(value, bool):
        raise ConfigError(f"config.json: {key} is {value!r}; it must be true or false.")
    return value
