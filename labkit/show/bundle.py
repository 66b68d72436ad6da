"""One script out of several: the page's modules joined in the order in which they import each other.

A widget travels as one ES module, and there is no build step: each file under `web/` is an ordinary module that
imports its neighbours by relative path; here the imports are followed, dropped, and the files joined, so that they
share one scope. Two files that define the same name would silently shadow each other, hence the check.
"""

from __future__ import annotations

import re
from pathlib import Path

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w.-]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class)\b)", re.MULTILINE)
_TOP_LEVEL = re.compile(r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", re.MULTILINE)


def bundle(entry: Path) -> str:
    """The module at `entry` and all that it imports, as the text of one module.

    Raises ValueError when two files define the same top-level name.
    """
    order: list[Path] = []
    _visit(entry, order)
    _check_names(order)
    return "\n".join(_body(path, keep_exports=path == entry) for path in order)


def _visit(path: Path, order: list[Path]) -> None:
    if path in order:
        return
    for name in _IMPORT.findall(path.read_text(encoding="utf-8")):
        _visit(path.parent / name, order)
    order.append(path)


def _body(path: Path, keep_exports: bool) -> str:
    text = _IMPORT.sub("", path.read_text(encoding="utf-8"))
    return text if keep_exports else _EXPORT.sub("", text)


def _check_names(paths: list[Path]) -> None:
    owner: dict[str, Path] = {}
    for path in paths:
        for name in _TOP_LEVEL.findall(path.read_text(encoding="utf-8")):
            if owner.setdefault(name, path) != path:
                raise ValueError(f"{path.name} and {owner[name].name} both define {name}; rename one of them.")
