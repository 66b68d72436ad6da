"""Ranks on two nodes joined by a slow link give what transformers gives, whichever groups span the nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hard_batch import assert_parity
from real_ranks import RealRanks
from tiny_models import make_checkpoint

from labkit.cluster.nodes import Link, Nodes
from labkit.layout import Layout
from tests.cluster.made_nodes import needs_nodes, of_owner

pytestmark = [needs_nodes, pytest.mark.engine]
RATE = 200 * 10**6
SHAPES = {"2x2": Nodes(2, 2, Link(RATE)), "2x1": Nodes(2, 1, Link(RATE))}
CASES = [
    ("2x2", "tp2", {"tp": "shm"}),
    ("2x2", "dp2xtp2", {"tp": "shm", "dp": "gloo"}),
    ("2x2", "tp4", {"tp": "gloo"}),
    ("2x2", "pp2xtp2", {"tp": "shm", "pp": "gloo"}),
    *(
        pytest.param("2x1", slug, {slug[:2]: "gloo"}, marks=pytest.mark.slow, id=f"2x1-{slug}")
        for slug in ("tp2", "dp2", "pp2")
    ),
]
"""Nodes x ranks, layout, and what must carry each axis."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints"), "llama-tied-llama3-rope")


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RealRanks]]:
    made = {shape: RealRanks(tmp_path_factory.mktemp(shape), nodes=nodes) for shape, nodes in SHAPES.items()}
    yield made
    for ranks in made.values():
        ranks.close()
    assert of_owner(os.getpid()) == []


@pytest.mark.parametrize(("shape", "slug", "carriers"), CASES, ids=lambda value: value if type(value) is str else "")
def test_layout_over_nodes_gives_what_transformers_gives(
    pools: dict[str, RealRanks], folder: Path, shape: str, slug: str, carriers: dict[str, str]
) -> None:
    ranks = pools[shape]
    assert_parity(ranks, folder, Layout.parse(slug))
    state = ranks.engine.state()
    told = {group["axis"]: group["fabric"] for group in state["groups"] if group["axis"] in carriers}
    assert told == carriers
    assert all(group["spans_nodes"] == (group["fabric"] == "gloo") for group in state["groups"])
    assert state["clock"] == "shared" and state["clocks"] == []
