"""The words of the pages: one catalogue a language, keyed by id, both whole.

A page gets every catalogue at once and changes language without a reload. Names that the field uses everywhere (TTFT,
TPOT, rank, all-reduce) stay English, with a gloss where they first appear. `{name}` marks a place to fill in.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

LANGUAGES = {"en": "English", "zh": "中文"}
_TEXT = Path(__file__).parent / "text"


@functools.cache
def catalogue(language: str) -> dict[str, str]:
    """Text by id of one of `LANGUAGES`."""
    if language not in LANGUAGES:
        raise ValueError(f"No catalogue for language {language!r}; there are {', '.join(LANGUAGES)}.")
    return json.loads((_TEXT / f"{language}.json").read_text(encoding="utf-8"))


def catalogues() -> dict[str, dict[str, str]]:
    return {language: catalogue(language) for language in LANGUAGES}


def places(text: str) -> set[str]:
    """Names of the places to fill in: `{rank}` → {"rank"}."""
    return set(re.findall(r"\{(\w+)\}", text))
