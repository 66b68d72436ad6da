"""Every exercise: its stub fails its check, its folded solution and the importable one pass it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from notebooks import LABS, exercises

ALL = [(path, index) for path in LABS for index in range(len(exercises(path)))]
IDS = [f"{path.stem}-{index + 1}" for path, index in ALL]


def outcome(path: Path, definition: str, check: str) -> Any:
    """What the check cell says of a definition, run as the notebook runs it."""
    module = importlib.import_module(f"labkit.teach.lesson{path.stem[:2]}")
    space: dict[str, Any] = {"np": np, module.__name__.rpartition(".")[2]: module}
    exec(definition, space)
    return eval(check, space)


def test_every_lesson_has_an_exercise():
    assert len(LABS) >= 3 and all(exercises(path) for path in LABS)


@pytest.mark.parametrize(("path", "index"), ALL, ids=IDS)
def test_the_stub_fails_and_says_that_it_is_not_written(path: Path, index: int):
    stub, check, _ = exercises(path)[index]
    found = outcome(path, stub, check)
    assert not found and not any(each.ok for each in found.outcomes)
    assert "not written yet" in repr(found) and "✕" in found._repr_html_()


@pytest.mark.parametrize(("path", "index"), ALL, ids=IDS)
def test_the_folded_solution_passes(path: Path, index: int):
    _, check, solution = exercises(path)[index]
    found = outcome(path, solution, check)
    assert found, repr(found)


@pytest.mark.parametrize(("path", "index"), ALL, ids=IDS)
def test_the_importable_solution_passes(path: Path, index: int):
    stub, check, _ = exercises(path)[index]
    name = stub.split("def ")[1].split("(")[0]
    assert outcome(path, f"from labkit.teach.lesson{path.stem[:2]} import {name}", check)


MISTAKES = [
    ("00", "lambda t0, at, k: ((at[0] - t0) / 1e6, (at[-1] - at[0]) / 1e6 / len(at))"),
    ("00", "lambda t0, at, k: ((at[0] - t0) / 1e6, (at[-1] - at[0]) / 1e6 / max(1, sum(k) - 1))"),
    ("01", "lambda prompt, load, free, cached: load + prompt - cached"),
    ("01", "lambda prompt, load, free, cached: -cached"),
    ("02", "lambda x, up, down, tp: [np.maximum(x @ up, 0) @ down / tp] * tp"),
    ("03", "lambda stage_ms, k: [1 - min(k, len(stage_ms)) / len(stage_ms)] * len(stage_ms)"),
    ("03", "lambda stage_ms, k: [1 - ms / max(stage_ms) for ms in stage_ms]"),
    ("03", "lambda stage_ms, k: [1 - k * ms / sum(stage_ms) for ms in stage_ms]"),
]


@pytest.mark.parametrize(("number", "mistake"), MISTAKES)
def test_a_likely_mistake_is_caught(number: str, mistake: str):
    path = next(path for path in LABS if path.stem.startswith(number))
    stub, check, _ = exercises(path)[0]
    name = stub.split("def ")[1].split("(")[0]
    assert not outcome(path, f"{name} = {mistake}", check)


def test_an_answer_that_raises_is_told_and_not_raised():
    path = LABS[0]
    found = outcome(path, "def ttft_tpot(*_): return 1 / 0", exercises(path)[0][1])
    assert not found and "ZeroDivisionError" in repr(found)


def test_teaching_imports_neither_torch_nor_plotly_nor_pandas():
    code = (
        "import sys; from labkit.teach import begin, lesson00, lesson01, lesson02, lesson03;"
        "from labkit.show import figures, figures_pipeline;"
        "print([name for name in ('torch', 'plotly', 'pandas', 'rfc3987_syntax') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
