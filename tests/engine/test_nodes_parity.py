"""Ranks on two nodes joined by a slow link give what transformers gives, whichever groups span the nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hard_batch import assert_parity
from put_in import (
    LAYER,
    LONG_S,
    MODEL,
    PROMPT_TOKENS,
    SETTINGS,
    SPEC,
    decoded,
    medians_us,
    prefills,
    rows_of,
    sums,
    through_the_link_us,
)
from real_ranks import RealRanks
from tiny_models import make_checkpoint

from labkit.cluster.nodes import Link, Nodes
from labkit.engine.messages import Fault
from labkit.layout import Layout
from labkit.measure.breakdown import unaccounted_share
from labkit.measure.collective_log import as_frame
from labkit.measure.lateness import who_is_late
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


# ---- a straggler and a slow link are told apart: bounds that a busy machine leaves true


@pytest.fixture(scope="module")
def two(pools: dict[str, RealRanks]) -> RealRanks:
    ranks = pools["2x1"]
    ranks.run(ranks.stand(MODEL, SETTINGS))
    return ranks


def test_a_straggler_is_waited_for_and_named_with_its_layer(two: RealRanks) -> None:
    """It sleeps at least as long, and so long that what a busy machine adds elsewhere is little beside it."""
    rows = decoded(two, LONG_S, 12)
    wait_us, _ = medians_us(sums(rows, 0, LAYER))
    assert wait_us >= 0.8 * LONG_S * 1e6
    assert np.median(sums(rows, 1, LAYER)["wait_ns"]) == 0, "the last to come waits for nobody"
    _, figures = who_is_late(as_frame(rows), ("decode",), [])
    assert (figures["straggler"], figures["layer"]) == (1, LAYER)


def test_a_slow_link_is_transfer_on_both_ranks_and_never_quicker_than_its_rate(two: RealRanks) -> None:
    """The two ends of a bucket let a few packets through at once: a twentieth at most of such a message."""
    rows = prefills(two, 1, PROMPT_TOKENS)
    for rank in (0, 1):
        mine = sums(rows, rank)
        assert len(mine) == 2 * SPEC.num_layers
        assert medians_us(mine)[1] >= 0.95 * through_the_link_us(PROMPT_TOKENS, RATE)


def test_the_parts_of_every_step_fill_it(two: RealRanks) -> None:
    """Of real steps, with a straggler and a slow link in them: exact sums, whatever the load."""
    two.pool.send(1, Fault("delay", LONG_S, LAYER))
    rows_of(two, ([1] * 256, 4), ([2] * 40, 4))
    two.pool.send(1, Fault("delay"))
    steps = two.steps()
    assert {step.num_prefill_seqs > 0 for step in steps} == {True, False}
    assert max(unaccounted_share([step]) for step in steps) <= 0.01
    for event in two.requests():
        span = event["first_end_ns"] - event["received_ns"]
        parts = sum(event[f"{part}_ns"] for part in ("queue", "compute", "wait", "transfer"))
        assert abs(parts - span) <= 0.01 * span
