"""The words of the pages: one catalogue a language, keyed by id, both whole.

A page gets every catalogue at once and changes language without a reload. Names that the field uses everywhere (TTFT,
TPOT, rank, all-reduce) stay English, with a gloss where they first appear. `{name}` marks a place to fill in. Sentences
that lower rooms say (`labkit.said`) are found by their English pattern, which is its own text in English.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

from labkit.said import Said

LANGUAGES = {"en": "English", "zh": "中文"}
_TEXT = Path(__file__).parent / "text"


@functools.cache
def catalogue(language: str) -> dict[str, str]:
    """Text by id of one of `LANGUAGES`."""
    if language not in LANGUAGES:
        raise ValueError(f"No catalogue for language {language!r}; there are {', '.join(LANGUAGES)}.")
    return json.loads((_TEXT / f"{language}.json").read_text(encoding="utf-8"))


@functools.cache
def sentences(language: str) -> dict[str, str]:
    """Text by English pattern, of a language that is not English."""
    return json.loads((_TEXT / f"sentences.{language}.json").read_text(encoding="utf-8"))


def catalogues() -> dict[str, dict[str, str]]:
    """Of every language, all that a page may say."""
    return {language: catalogue(language) | (sentences(language) if language != "en" else {}) for language in LANGUAGES}


def in_parts(value: Any) -> Any:
    """The same with each sentence as {"said": its pattern, "of": its values}, for `sentence` of web/sentence.js."""
    if isinstance(value, Said):
        return {"said": value.pattern, "of": in_parts(dict(value.values))}
    if isinstance(value, dict):
        return {name: in_parts(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [in_parts(item) for item in value]
    return value


def places(text: str) -> set[str]:
    """Names of the places to fill in: `{rank}` → {"rank"}."""
    return set(re.findall(r"\{(\w+)\}", text))
