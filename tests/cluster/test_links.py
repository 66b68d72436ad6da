"""A shaped link gives what its rate predicts: gloo's all-reduce of a mebibyte, by the benchmark that users run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.made_nodes import needs_nodes

pytestmark = [needs_nodes, pytest.mark.engine, pytest.mark.slow]  # timed: not on a machine that others use
_ROOT = Path(__file__).parents[2]
_MIB = 1 << 20


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, int], dict[str, Any]]:
    """By link and bytes."""
    command = [sys.executable, "benchmarks/links.py", "--rates", "0,100mbit,200mbit", "--rounds", "12"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=200, env=_env())
    assert done.returncode == 0, done.stderr
    return {(row["link"], row["bytes"]): row for row in json.loads(done.stdout.splitlines()[-1])["links"]}


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(_ROOT)}


@pytest.mark.parametrize("link", ["100mbit", "200mbit"])
def test_a_mebibyte_takes_what_the_rate_predicts_within_a_tenth(rows: dict[Any, Any], link: str) -> None:
    """Of the fastest round, since neighbours on the cores can only slow one down; the median may be a little more."""
    row = rows[link, _MIB]
    assert 0.9 < row["best_over_predicted"] < 1.1
    assert row["measured_over_predicted"] < 1.25


def test_the_rates_are_told_apart_and_an_unshaped_link_is_far_faster(rows: dict[Any, Any]) -> None:
    assert rows["100mbit", _MIB]["best_ms"] / rows["200mbit", _MIB]["best_ms"] == pytest.approx(2, rel=0.1)
    assert rows["unshaped", _MIB]["best_ms"] < rows["200mbit", _MIB]["best_ms"] / 5


def test_a_decode_sized_message_hardly_feels_the_link(rows: dict[Any, Any]) -> None:
    """4 KiB fit in what may pass at once: milliseconds at most, where the mebibyte takes tens of them."""
    assert rows["100mbit", 4096]["best_ms"] < rows["100mbit", _MIB]["best_ms"] / 40
