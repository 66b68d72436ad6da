"""Real ranks that tests share: four that all files go on with, and eight for a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from real_ranks import RealRanks, real_ranks


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRanks]:
    with real_ranks(tmp_path_factory.mktemp("pool")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRanks]:
    with real_ranks(tmp_path_factory.mktemp("pool"), num_ranks=8) as ranks:
        yield ranks
