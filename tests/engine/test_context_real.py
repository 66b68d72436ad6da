"""Positions shared out over four real ranks under torchrun: what transformers gives, tokens exactly, logits 1e-4.

As in `test_parity_real`, one batch meets ragged lengths, chunks, a shared prefix and preemption; and the KV
memory of a rank holds as many times more tokens as ranks share them out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_parity_real import BLOCK_SIZE, FourRanks, assert_as_transformers
from tiny_models import make_checkpoint

from labkit.engine.core import EngineSettings
from labkit.layout import Layout
from labkit.measure.records import StepRecord

pytestmark = pytest.mark.engine
FAMILY_OF_HEADS = {1: "mistral-window", 2: "llama-tied-llama3-rope"}
LAYOUTS = [
    (2, "pcp2"),
    (2, "pcp2+ring"),
    (2, "pcp4"),
    (2, "pcp3+ring"),
    (2, "tp2xpcp2"),
    (2, "tp2xpcp2+ring"),
    (2, "dp2xpcp2"),
    (2, "pcp2xdcp2"),
    (2, "pcp4xdcp4+ring"),
    (2, "tp2xpcp2xdcp2"),
    (2, "tp4xdcp2"),
    (1, "tp2xdcp2"),
    (1, "tp4xdcp4"),
    (1, "pcp2+ring"),
    (1, "tp2xpcp2xdcp4"),
    (1, "tp2xpcp2xdcp4+ring"),
]
CAPACITIES = [(2, "pcp2", "pcp2xdcp2"), (2, "tp4", "tp4xdcp2"), (1, "tp2", "tp2xdcp2")]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FourRanks]:
    made = FourRanks(tmp_path_factory.mktemp("pool"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        heads: make_checkpoint(folder / str(heads), family, num_key_value_heads=heads)
        for heads, family in FAMILY_OF_HEADS.items()
    }


@pytest.mark.parametrize(("num_kv_heads", "slug"), LAYOUTS)
def test_shared_positions_give_what_transformers_gives(
    ranks: FourRanks, folders: dict[int, Path], num_kv_heads: int, slug: str
) -> None:
    folder, layout = folders[num_kv_heads], Layout.parse(slug)
    answered = ranks.serve(folder, layout)
    for request, outputs in answered:
        assert_as_transformers(folder, request, outputs)
    told = [event for event in ranks.events if event["event"] == "request"]
    assert sum(event["cached_tokens"] for event in told) > 0, "no prefix was found in the cache"
    if layout.dp == 1:
        assert sum(request.num_preemptions for request, _ in answered) > 0, "nothing was preempted"
    assert_balance_is_told(ranks, layout)


def assert_balance_is_told(ranks: FourRanks, layout: Layout) -> None:
    """Each step that read prompts says how many keys each pcp rank's queries saw."""
    assert ranks.engine is not None
    ranks.runner.run(ranks.engine.settle())
    steps: list[StepRecord] = [s for event in ranks.events if event["event"] == "steps" for s in event["steps"]]
    read = [step.query_keys for step in steps if step.num_prefill_seqs]
    assert read and all(len(keys) == (layout.pcp if layout.pcp > 1 else 0) for keys in read)
    if layout.pcp > 1:
        assert all(max(keys) > 0 for keys in read)


@pytest.mark.parametrize(("num_kv_heads", "whole", "shared"), CAPACITIES)
def test_sharing_positions_out_multiplies_the_tokens_that_fit(
    ranks: FourRanks, folders: dict[int, Path], num_kv_heads: int, whole: str, shared: str
) -> None:
    ranks.serve(folders[num_kv_heads], Layout.parse(whole))
    before, after = (resident_tokens(ranks, Layout.parse(slug)) for slug in (whole, shared))
    assert after / before == pytest.approx(2, rel=0.05)


def resident_tokens(ranks: FourRanks, layout: Layout) -> int:
    """With one budget a rank, and a limit on sequences that no pool of it reaches."""
    assert ranks.engine is not None
    settings = EngineSettings(
        layout=layout, memory_per_rank=2**20, block_size=BLOCK_SIZE, max_num_batched_tokens=512, max_num_seqs=512
    )
    ranks.runner.run(asyncio.wait_for(ranks.engine.switch(settings), 60))
    (replica,) = ranks.engine.state()["replicas"]
    return int(replica["kv_total_blocks"] * replica["kv_block_tokens"])
