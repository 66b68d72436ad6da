"""A sentence that can be shown in other languages: English as it stands, and the pattern and values it was made of.

`say("It needs {n:,} ranks.", n=1024)` is the string "It needs 1,024 ranks." to whoever prints, compares or stores it. A
page that has the pattern in another language (`labkit.show.i18n`) fills the same values into that. Values are formatted
once, as the pattern says; one that is a sentence stays one, so that it is translated too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache, reduce
from string import Formatter
from typing import Any


class Said(str):
    """English. `pattern` has `{name}` where `values` go, without their formats."""

    pattern: str = ""
    values: Mapping[str, str] = {}


def say(pattern: str, /, **values: Any) -> Said:
    """`pattern` in the form of str.format, filled in. Raises KeyError for a place without a value."""
    bare, places = _read(pattern)
    shown = {name: _shown(values[name], spec) for name, spec in places}
    said = Said(bare.format_map(shown))
    said.pattern, said.values = bare, shown
    return said


def bare_pattern(pattern: str) -> str:
    """Without the formats of its places: what a sentence is found by in other languages."""
    return _read(pattern)[0]


@lru_cache(maxsize=1024)
def _read(pattern: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    text, places = "", {}
    for literal, name, spec, _ in Formatter().parse(pattern):
        text += literal
        if name is not None:
            text += f"{{{name}}}"
            places[name] = spec or ""
    return text, tuple(places.items())


def _shown(value: Any, spec: str) -> str:
    return value if isinstance(value, Said) else format(value, spec)


# ---- sentences beside each other


def in_turn(*told: str) -> str:
    """Whole sentences one after another; empty ones are left out."""
    return _joined("{first} {then}", told)


def with_semicolons(told: Iterable[str]) -> str:
    return _joined("{first}; {then}", told)


def with_commas(told: Iterable[str]) -> str:
    return _joined("{first}, {then}", told)


def _joined(pattern: str, told: Iterable[str]) -> str:
    given = [one for one in told if one]
    return reduce(lambda first, then: say(pattern, first=first, then=then), given) if given else ""


def said_by(error: Exception) -> str:
    """An error's sentence, still in parts where it was raised with one."""
    return error.args[0] if error.args and isinstance(error.args[0], Said) else str(error)
