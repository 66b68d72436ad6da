"""How commands are written down: a flag and its value on a line each, files as here-documents. Plain strings."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def command_text(first: Sequence[str], words: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """`NAME=value first \\\\` and a line for each flag with what follows it, ready for a shell."""
    set_before = [f"{name}={shlex.quote(value)}" for name, value in (environment or {}).items()]
    head = " ".join([*set_before, *map(shlex.quote, first)])
    return " \\\n  ".join([head, *_lines(words)])


def _lines(words: Sequence[str]) -> Iterator[str]:
    line: list[str] = []
    for word in words:
        if word.startswith("-") and line:
            yield " ".join(line)
            line = []
        line.append(shlex.quote(word))
    if line:
        yield " ".join(line)


def file_text(name: str, content: str) -> str:
    """A shell text that writes a file."""
    return f"cat > {shlex.quote(name)} <<'END'\n{content}END\n"


def yaml_text(options: Mapping[str, Any], indent: str = "") -> str:
    """Block YAML of nested mappings, lists and scalars; scalars as JSON writes them, which YAML reads alike."""
    lines = []
    for name, value in options.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{name}:\n{yaml_text(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{name}: {json.dumps(value)}\n")
    return "".join(lines)
