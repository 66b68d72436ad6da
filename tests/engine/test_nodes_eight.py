"""Two nodes of four ranks give what transformers gives, whichever axis crosses the link between them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hard_batch import assert_as_transformers, serve
from real_ranks import RealRanks, real_ranks
from tiny_models import make_checkpoint

from labkit.cluster.nodes import Link, Nodes
from labkit.layout import Layout
from tests.cluster.made_nodes import needs_nodes, of_owner

pytestmark = [needs_nodes, pytest.mark.engine, pytest.mark.slow]
CASES = {
    "pp2xtp4": {"tp": ("shm", False), "pp": ("gloo", True)},
    "dp2xtp4": {"tp": ("shm", False), "dp": ("gloo", True)},
    "tp8": {"tp": ("gloo", True)},
}
"""Layout, and for each axis what must carry it and whether it spans the nodes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints"), "llama-tied-llama3-rope")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRanks]:
    with real_ranks(tmp_path_factory.mktemp("2x4"), nodes=Nodes(2, 4, Link(200 * 10**6))) as made:
        yield made
    assert of_owner(os.getpid()) == []


@pytest.mark.parametrize("slug", CASES)
def test_eight_ranks_on_two_nodes_give_what_transformers_gives(ranks: RealRanks, folder: Path, slug: str) -> None:
    assert_as_transformers(folder, serve(ranks, folder, Layout.parse(slug)))
    groups = ranks.engine.state()["groups"]
    told = {group["axis"]: (group["fabric"], group["spans_nodes"]) for group in groups if group["axis"] in CASES[slug]}
    assert told == CASES[slug]
