"""A switch is a layout plus a few changed settings; both are checked here before anything living is touched."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from labkit.engine.settings import EngineSettings
from labkit.layout import read_layout, require_deployable
from labkit.model.spec import ModelSpec
from labkit.server.errors import ApiError
from labkit.server.sizes import parse_bytes

_KINDS = {f.name: type(f.default) for f in dataclasses.fields(EngineSettings) if f.name != "layout"}


def changed_settings(
    current: EngineSettings, layout: str, changes: dict[str, Any], spec: ModelSpec, num_ranks: int
) -> EngineSettings:
    """`current` with another layout (empty: the same) and changes. ApiError 400 with the reason."""
    checked = {name: check_setting(name, value) for name, value in changes.items()}
    try:
        wanted = read_layout(layout) if layout else current.layout
        require_deployable(wanted, spec, num_ranks, engine=True)
    except ValueError as error:
        raise ApiError(400, str(error), "layout") from error
    try:
        return dataclasses.replace(current, layout=wanted, **checked)
    except ValueError as error:
        raise ApiError(400, str(error), "settings") from error


def check_setting(name: str, value: Any) -> Any:
    """The value, of the setting's type (a size may be text). Raises ApiError 400."""
    if name not in _KINDS:
        near = difflib.get_close_matches(name, _KINDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(_KINDS))}."
        raise ApiError(400, f"There is no setting {name!r}: {hint}", "settings")
    if name == "memory_per_rank" and isinstance(value, str):
        value = _bytes(value)
    if _KINDS[name] is float and type(value) is int:
        value = float(value)
    if type(value) is not _KINDS[name]:
        raise ApiError(400, f"The setting {name} takes {_KINDS[name].__name__}, not {value!r}.", "settings")
    return value


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ApiError(400, str(error), "settings") from error
