"""A machine's roofs for a page: of this CPU only, never while somebody measures, and kept."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from labkit.lab import roofs
from labkit.lab.roofs import MachineRoofs, machine_roofs

HERE = {"backend": "cpu", "host": socket.gethostname()}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    return tmp_path


def test_measured_once_and_kept_for_a_day(home: Path):
    found = machine_roofs(HERE, lambda: True)
    assert found is not None and found.read_gb_s > 0.1 and found.gflop_s > 0.1
    assert machine_roofs(HERE, lambda: False) == found, "kept: no second measurement is needed"
    row = json.loads((home / "roofs.json").read_text())
    (home / "roofs.json").write_text(json.dumps(row | {"at": time.time() - 2 * roofs.KEPT_S}))
    assert machine_roofs(HERE, lambda: False) is None, "of yesterday: another day the machine is another"


def test_not_while_a_load_is_under_way_nor_of_another_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(roofs, "_measured", lambda: MachineRoofs(10.0, 40.0))
    assert machine_roofs(HERE, lambda: False) is None
    answers = iter([True, False])
    assert machine_roofs(HERE, lambda: next(answers)) is None, "somebody began meanwhile"
    assert machine_roofs({**HERE, "host": "elsewhere"}, lambda: True) is None


def test_a_file_that_was_not_written_whole_is_none(home: Path):
    for text in ("", "[1]", '{"host": 1}'):
        (home / "roofs.json").write_text(text)
        assert machine_roofs(HERE, lambda: False) is None
