from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_double import Double, Script


@pytest.fixture(scope="module")
def shared_double(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Double]:
    double = Double(tmp_path_factory.mktemp("home"))
    yield double
    double.close()


@pytest.fixture
def double(shared_double: Double) -> Double:
    """The module's server with a fresh script."""
    engine = shared_double.engine
    engine.script, engine.switch_error = Script(), None
    for record in (engine.submitted, engine.cancelled, engine.finished, engine.switched, engine.faults):
        record.clear()
    return shared_double


@pytest.fixture
def own_double(tmp_path: Path) -> Iterator[Double]:
    """A server for one test, where leases and ends are its subject."""
    double = Double(tmp_path)
    yield double
    double.close()
