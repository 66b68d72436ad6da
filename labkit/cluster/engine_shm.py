"""What an engine's ranks leave in shared memory, found while they live and removed when they are gone.

vLLM's ranks on a CPU exchange through files in /dev/shm and never remove them, and whoever is killed removes nothing.
A file counts as the engine's own when it came after the start and one of the engine's processes has it mapped. The
names are also kept in a note, for the next start to clean up after a starter that was killed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

SHM = Path("/dev/shm")
_NOTE = "labkit-shm"


class SharedMemory:
    """Files of /dev/shm that a family of processes brought. `folder`: where the note lies."""

    def __init__(self, folder: Path, shm: Path = SHM) -> None:
        self._note, self._shm = folder / _NOTE, shm
        self._before = _names(shm)
        self.names: set[str] = set()

    def look(self, pids: Iterable[int]) -> None:
        """Adds what these processes have mapped now; cheap as long as /dev/shm has nothing unknown in it."""
        unknown = _names(self._shm) - self._before - self.names
        if not unknown:
            return
        found = {name for pid in pids for name in unknown & _mapped(pid, self._shm)}
        if found:
            self.names |= found
            self._note.write_text("\n".join(sorted(self.names)))

    def remove(self) -> None:
        """To be called when the processes are gone. Safe to call twice."""
        _remove(self.names, self._shm)


def remove_noted(folder: Path, shm: Path = SHM) -> None:
    """What a start that was killed had noted in its folder; nothing where there is no note."""
    with contextlib.suppress(OSError):
        _remove((folder / _NOTE).read_text().split("\n"), shm)


def _remove(names: Iterable[str], shm: Path) -> None:
    for name in names:
        if name and "/" not in name:
            with contextlib.suppress(OSError):
                (shm / name).unlink()


def _names(shm: Path) -> set[str]:
    try:
        return {path.name for path in shm.iterdir() if path.is_file()}
    except OSError:
        return set()


def _mapped(pid: int, shm: Path) -> set[str]:
    """Names of the files in `shm` that a process has mapped; nothing of a process that is gone or not ours to ask."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            places = (line.partition(f" {shm}/")[2].rstrip("\n") for line in maps)
            return {place for place in places if place}
    except OSError:
        return set()
