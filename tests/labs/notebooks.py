"""Reading the lessons' notebooks: their exercises, checks and solutions, and their form."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from labkit.paths import repo_dir

LABS = sorted((repo_dir() / "labs").glob("[0-9][0-9]-*.ipynb"))
_SOLUTION = re.compile(r"```python\n(.*?)```", re.S)


def cells(path: Path, kind: str = "") -> list[dict[str, Any]]:
    found = json.loads(path.read_text())["cells"]
    return [cell for cell in found if cell["cell_type"] == (kind or cell["cell_type"])]


def text(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def tagged(path: Path, tag: str) -> list[str]:
    return [text(cell) for cell in cells(path) if tag in cell["metadata"].get("tags", [])]


def exercises(path: Path) -> list[tuple[str, str, str]]:
    """(stub, check, solution) as source, in the order of the notebook."""
    solutions = [_SOLUTION.findall(cell) for cell in tagged(path, "solution")]
    assert all(len(found) == 1 for found in solutions), "one python block in every folded solution"
    stubs, checks = tagged(path, "exercise"), tagged(path, "check")
    return list(zip(stubs, checks, [found[0] for found in solutions], strict=True))
