"""An engine's log while it is written: whole lines, without the colours and clocks that engines put in front."""

from __future__ import annotations

import re
from pathlib import Path

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIX = re.compile(r"^(\([^)]*pid=\d+\) *)?((DEBUG|INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d (\[[^]]*\] *)?)?")


class LogFollower:
    """Whole lines as they come; what a writer has begun and not ended waits for its end."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._begun = path, 0, b""

    def new_lines(self) -> list[str]:
        """Without colours, and without the process, time and place that engines put in front; no empty ones."""
        with self._path.open("rb") as log:
            log.seek(self._at)
            written = log.read()
        self._at += len(written)
        *whole, self._begun = re.split(rb"[\r\n]+", self._begun + written)
        lines = (plain_line(line.decode(errors="replace")) for line in whole)
        return [line for line in lines if line]


def plain_line(line: str) -> str:
    """What a line of an engine's log says; warnings and errors keep their level, banners say nothing."""
    bare = _COLOUR.sub("", line).strip()
    match = _PREFIX.match(bare)
    said = bare[match.end() :].strip() if match else bare
    if not any(letter.isalnum() for letter in said):
        return ""
    level = match[3] if match and match[3] in ("WARNING", "ERROR") else ""
    return f"{level}: {said}" if level and said else said


def tail(log: Path, num_bytes: int = 16384) -> list[str]:
    """The last lines, raw; none where there is no such file."""
    try:
        with log.open("rb") as source:
            source.seek(max(0, log.stat().st_size - num_bytes))
            return source.read().decode(errors="replace").splitlines()
    except OSError:
        return []
