"""Measurements of what joins the ranks, kept: one JSON file for each place (machine, ranks, nodes, link) and layout.

What two ranks of a pool have between them does not depend on the layout; which collectives were measured does. So a
place's newest file is shown where the layout has none of its own, and says under which it was measured.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import msgspec

_PLACE = ("host", "backend", "num_ranks", "num_nodes", "link")


class FabricStore:
    """`folder` is made when something is kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, found: dict[str, Any]) -> Path:
        """Replaces what was measured before at this place under this layout. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{_place(found)}--{_word(found['layout'])}.json"
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_bytes(msgspec.json.encode(found))
        os.replace(draft, path)
        return path

    def find(self, wanted: dict[str, Any]) -> dict[str, Any] | None:
        """The last measurement at a place, of its layout if there is one. wanted: _PLACE's fields and layout."""
        files = sorted(self._folder.glob(f"{_place(wanted)}--*.json"), key=lambda path: path.stat().st_mtime)
        own = [path for path in files if path.stem.endswith(f"--{_word(wanted['layout'])}")]
        for path in [*reversed(own), *reversed(files)]:
            try:
                found: dict[str, Any] = msgspec.json.decode(path.read_bytes())
                return found
            except (OSError, msgspec.DecodeError):
                continue  # half written, or of another hand: the next one
        return None


def _place(fields: dict[str, Any]) -> str:
    return "-".join(_word(str(fields[name])) for name in _PLACE)


def _word(text: str) -> str:
    return re.sub(r"[^\w.+=]", "_", text)
