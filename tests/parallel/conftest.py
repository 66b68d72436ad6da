from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.team import Team


@pytest.fixture(scope="session")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    team = Team(3, tmp_path_factory.mktemp("team"))
    yield team
    team.close()
