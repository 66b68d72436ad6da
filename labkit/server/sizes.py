"""Sizes as people write them: 256MiB, 1.5GB, 4096."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """Bytes. MiB and its kind are powers of 1024, MB and its kind of 1000. Raises ValueError."""
    match = _SIZE.fullmatch(text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size: write a number and a unit, such as 256MiB, 1.5GB or 4096.")
    return int(float(match[1]) * _UNITS[match[2].upper()])
