"""Joining the page's modules: dependencies first, each once, and no two of one name."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from labkit.show.bundle import bundle

WEB = Path(__file__).parents[2] / "labkit" / "show" / "web"


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.js").write_text(text)
    return folder / "main.js"


def test_dependencies_come_first_and_once(tmp_path: Path) -> None:
    entry = write(
        tmp_path,
        base="export const one = 1;\n",
        left='import { one } from "./base.js";\nexport const two = one + 1;\n',
        main='import { one } from "./base.js";\nimport { two } from "./left.js";\nexport default { sum: one + two };\n',
    )
    text = bundle(entry)
    assert text.count("const one") == 1 and "import" not in text
    assert text.index("const one") < text.index("const two") < text.index("export default")
    assert text.count("export") == 1


def test_two_files_with_one_name_are_refused(tmp_path: Path) -> None:
    entry = write(
        tmp_path,
        other="function draw() {}\nexport const x = 1;\n",
        main='import { x } from "./other.js";\nfunction draw() {}\nexport default x;\n',
    )
    with pytest.raises(ValueError, match="both define draw"):
        bundle(entry)


@pytest.mark.parametrize("entry", ["live.js", "fabric.js"])
def test_a_page_is_one_small_module(entry: str) -> None:
    text = bundle(WEB / entry)
    assert not any(line.startswith("import ") for line in text.splitlines())
    assert len(text.encode()) < 150_000, "every visitor gets it over the websocket"


def test_the_files_are_short_and_fetch_nothing() -> None:
    for path in WEB.glob("*.js"):
        text = path.read_text()
        assert len(text.splitlines()) < 300, path.name
        assert "https://" not in text and "innerHTML" not in text, path.name


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on this machine to parse the module with")
@pytest.mark.parametrize("entry", ["live.js", "fabric.js"])
def test_a_page_parses(tmp_path: Path, entry: str) -> None:
    (tmp_path / "page.mjs").write_text(bundle(WEB / entry))
    subprocess.run(["node", "--check", str(tmp_path / "page.mjs")], check=True, timeout=30)
