"""JSON as its standard has it: what is infinite or no number is null, for a strict reader refuses Infinity and NaN."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def finite(value: Any) -> Any:
    """The same with null for what is infinite or no number."""
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_line(value: Any) -> str:
    """One line that every reader takes."""
    return json.dumps(finite(value), allow_nan=False)
