"""A lesson's form: short cells, no outputs, every step there, and no number in the prose that nobody measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from notebooks import LABS, cells, text

every_lab = pytest.mark.parametrize("path", LABS, ids=[path.stem for path in LABS])
_MEASURED = re.compile(r"\d[\d.,]*\s*(ms|µs|seconds|tokens/s|requests/s|GB/s|GFLOP)\b")


@every_lab
def test_cells_are_short_and_clean(path: Path):
    for cell in cells(path, "code"):
        assert len(text(cell).strip().splitlines()) < 15, text(cell)
        assert cell["outputs"] == [] and cell["execution_count"] is None
    notebook = json.loads(path.read_text())
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert "widgets" not in notebook["metadata"] and path.stat().st_size < 200_000


@every_lab
def test_every_step_of_a_lesson_is_there_in_order(path: Path):
    prose = "\n".join(text(cell) for cell in cells(path, "markdown"))
    steps = ["**The question.**", "Predict", "**Why.**", "## Break it", "<details>"]
    steps += ["## What to remember", "## On your own GPUs"]
    places = [prose.rfind(step) if step == "<details>" else prose.find(step) for step in steps]
    assert -1 not in places and places == sorted(places)
    remembered = prose.split("## What to remember")[1].split("##")[0]
    assert len(re.findall(r"^- ", remembered, re.M)) == 3


@every_lab
def test_the_first_cell_says_where_and_the_last_what(path: Path):
    code = [text(cell) for cell in cells(path, "code")]
    assert "begin(" in code[0] and code[0].rstrip().endswith("lesson")
    assert code[-1].strip() == "lesson.measured()"


@every_lab
def test_predictions_default_to_none_and_are_shown_beside_the_answer(path: Path):
    code = "\n".join(text(cell) for cell in cells(path, "code"))
    assert all(value == "None" for value in re.findall(r"^my_\w+ = (\S+)", code, re.M))
    asked = set(re.findall(r'lesson\.predict\(\s*"(\w+)"', code))
    answered = set(re.findall(r'(?:key=|"at most", |"at least", |"exactly", )"(\w+)"', code))
    assert asked and asked <= answered


@every_lab
def test_the_prose_claims_no_measured_number(path: Path):
    for cell in cells(path, "markdown"):
        assert not _MEASURED.search(text(cell)), _MEASURED.search(text(cell))
