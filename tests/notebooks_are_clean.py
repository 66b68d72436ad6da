"""Fails when a notebook in git carries outputs, execution counts or widget state: those are built, never kept."""

import json
import subprocess
import sys
from pathlib import Path


def complaints(path: Path) -> list[str]:
    notebook = json.loads(path.read_text())
    found = []
    if "widgets" in notebook["metadata"]:
        found.append("widget state in its metadata")
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    if any(cell["outputs"] for cell in code):
        found.append("outputs")
    if any(cell["execution_count"] is not None for cell in code):
        found.append("execution counts")
    return found


def main() -> int:
    listed = subprocess.run(["git", "ls-files", "*.ipynb"], capture_output=True, text=True, check=True).stdout.split()
    bad = {name: found for name in listed if (found := complaints(Path(name)))}
    for name, found in bad.items():
        print(f"{name} is kept with {' and '.join(found)}; clean it: .venv/bin/nbstripout {name}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
