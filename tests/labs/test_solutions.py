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


_SENT = (
    "lambda source, expert, owner, n, hidden, size: [["
    "sum({there} * ((s, owner[e]) == (a, b)) + {back} * ((owner[e], s) == (a, b)) for s, e in zip(source, expert))"
    " * ({where}) for b in range(n)] for a in range(n)]"
)

_NO_RING_EDGE_BACK = """lambda stages, node_of, layers, row: sum(
    (2 * layers // len(stages) + (i == 0)) * 2 * (len(s) - 1) / len(s) * row
    * sum(node_of[a] != node_of[b] for a, b in zip(s, s[1:]))
    for i, s in enumerate(stages)
) + row * sum(node_of[a] != node_of[b] for s, t in zip(stages, stages[1:]) for a, b in zip(s, t))"""

MISTAKES = [
    ("00", "lambda t0, at, k: ((at[0] - t0) / 1e6, (at[-1] - at[0]) / 1e6 / len(at))"),
    ("00", "lambda t0, at, k: ((at[0] - t0) / 1e6, (at[-1] - at[0]) / 1e6 / max(1, sum(k) - 1))"),
    ("01", "lambda prompt, load, free, cached: load + prompt - cached"),
    ("01", "lambda prompt, load, free, cached: -cached"),
    ("02", "lambda x, up, down, tp: [np.maximum(x @ up, 0) @ down / tp] * tp"),
    ("03", "lambda stage_ms, k: [1 - min(k, len(stage_ms)) / len(stage_ms)] * len(stage_ms)"),
    ("03", "lambda stage_ms, k: [1 - ms / max(stage_ms) for ms in stage_ms]"),
    ("03", "lambda stage_ms, k: [1 - k * ms / sum(stage_ms) for ms in stage_ms]"),
    ("04", "lambda shares: sum(w for _, _, w in shares) / sum(t for _, t, _ in shares)[:, None]"),
    ("04", "lambda shares: sum(w / t[:, None] for _, t, w in shares) / len(shares)"),
    ("04", "lambda shares: (sum(np.exp(m) * w.T for m, _, w in shares) / sum(np.exp(m) * t for m, t, _ in shares)).T"),
    ("05", _SENT.format(there="(hidden + 1) * size", back="hidden * size", where="True")),  # what stays at home counts
    ("05", _SENT.format(there="hidden * size", back="hidden * size", where="a != b")),  # no label
    ("05", _SENT.format(there="(hidden + 1) * size", back="(hidden + 1) * size", where="a != b")),  # a label back
    ("05", _SENT.format(there="(hidden + 1) * size", back="0", where="a != b")),  # nothing comes back
    ("06", "lambda stages, node_of, layers, row: row * (len(stages) - 1)"),
    ("06", "lambda stages, node_of, layers, row: row * (2 * layers + 1) * len({node_of[r] for r in stages[0]})"),
    ("06", _NO_RING_EDGE_BACK),
    ("07", "lambda ttft, queue, kv, limit: 'nothing' if ttft <= limit else 'KV memory' if kv >= 0.95 else 'ranks'"),
    ("07", "lambda t, queue, kv, limit: 'nothing' if t <= limit else 'work' if t - queue > limit else 'ranks'"),
    ("08", "lambda c, tp: c['num_hidden_layers'] * 4 * c['num_key_value_heads'] // tp * c['hidden_size'] // 64"),
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
        "import sys; from labkit.teach import lesson00, lesson01, lesson02, lesson03, lesson04, lesson05, lesson06;"
        "from labkit.teach import lesson07, lesson08;"
        "from labkit.teach import begin;"
        "from labkit.show import figures, figures_context, figures_crossings, figures_experts, figures_pipeline;"
        "from labkit.show import figures_plan;"
        "print([name for name in ('torch', 'plotly', 'pandas', 'rfc3987_syntax') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
