"""How a layout is written: degrees joined by x or ×, options after a plus, in the shell, in JSON and on the
page.

`dp2xtp2+sp` and `DP2×TP2+sp` are the same value. The printed order is fixed (dp, pp, pcp, tp, dcp, ep, then
sp, ring, split), so two layouts are equal exactly when their slugs are. Anything else is refused with what
was found and what is allowed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Protocol

AXES = ("dp", "pp", "pcp", "tp", "dcp", "ep")
"""Every axis of a layout, in the order in which it is printed."""
OPTIONS = ("sp", "ring", "split")
MAX_DEGREE = 65_536

_EXAMPLE = "a layout looks like tp2, dp2xtp2, pp2+split=4-6 or tp2+sp"
_DEGREE = re.compile(r"([a-z]+)(\d+)")


class LayoutError(ValueError):
    """A layout that cannot be read, or that a model or machine does not allow; the message is a sentence."""


class LayoutFields(Protocol):
    """What printing needs: a degree an axis, and the options."""

    @property
    def sp(self) -> bool: ...
    @property
    def ring(self) -> bool: ...
    @property
    def split(self) -> tuple[int, ...] | None: ...


def parse_fields(text: str) -> dict[str, int | bool | tuple[int, ...]]:
    """The keyword arguments of the `Layout` that `text` names. Raises LayoutError."""
    degrees, *options = text.strip().lower().replace("×", "x").split("+")
    if not degrees:
        raise LayoutError(f"{text!r} names no layout; {_EXAMPLE}.")
    fields: dict[str, int | bool | tuple[int, ...]] = {}
    for word in degrees.split("x"):
        axis, degree = _parse_degree(word.strip(), text)
        _refuse_repeat(axis, fields, text)
        fields[axis] = degree
    for word in options:
        option, value = _parse_option(word.strip(), text)
        _refuse_repeat(option, fields, text)
        fields[option] = value
    return fields


def _refuse_repeat(key: str, fields: dict[str, int | bool | tuple[int, ...]], text: str) -> None:
    if key in fields:
        raise LayoutError(f"{text!r} gives {key} twice; give each axis and option once.")


def _parse_degree(word: str, text: str) -> tuple[str, int]:
    match = _DEGREE.fullmatch(word)
    if not match:
        raise LayoutError(f"{word!r} in {text!r} is not an axis with its degree; {_EXAMPLE}.")
    axis, degree = match[1], match[2]
    if axis not in AXES:
        raise LayoutError(
            f"{axis!r} in {text!r} is no axis; the axes are {', '.join(AXES)}.{_closest(axis, AXES)}"
        )
    if len(degree) > len(str(MAX_DEGREE)):  # before int(): a million digits are a slow way to say no
        raise LayoutError(f"{axis} is {degree[:12]}… in {text[:40]!r}; a degree is at most {MAX_DEGREE}.")
    return axis, int(degree)


def _parse_option(word: str, text: str) -> tuple[str, bool | tuple[int, ...]]:
    name, equals, value = word.partition("=")
    if name not in OPTIONS:
        raise LayoutError(
            f"{word!r} in {text!r} is no option; the options are +sp, +ring and +split=4-6."
            f"{_closest(name, OPTIONS)}"
        )
    if name != "split":
        if equals:
            raise LayoutError(f"+{name} in {text!r} takes no value; write +{name}.")
        return name, True
    if not re.fullmatch(r"\d{1,6}(-\d{1,6})*", value):
        raise LayoutError(f"{word!r} in {text!r}: split lists the layers of each stage, as in +split=4-6.")
    return name, tuple(int(layers) for layers in value.split("-"))


def _closest(given: str, allowed: Sequence[str]) -> str:
    close = difflib.get_close_matches(given, allowed, n=1)
    return f" Did you mean {close[0]}?" if close else ""


def format_fields(layout: LayoutFields, *, pretty: bool) -> str:
    """The slug (`dp2xtp2+sp`), or the printed form (`DP2×TP2+sp`). The layout of one rank is TP1."""
    words = [f"{axis}{degree}" for axis in AXES if (degree := getattr(layout, axis)) > 1] or ["tp1"]
    text = "×".join(words).upper() if pretty else "x".join(words)
    return text + _format_options(layout)


def _format_options(layout: LayoutFields) -> str:
    text = "+sp" * layout.sp + "+ring" * layout.ring
    return text + (f"+split={'-'.join(map(str, layout.split))}" if layout.split else "")
