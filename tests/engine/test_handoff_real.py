"""Prefill apart from decode on real ranks: what transformers gives, whatever the two layouts; and a rank that is killed
in the middle of a handoff is named within five seconds."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from test_parity_real import ASKED, BLOCK_SIZE, NUM_BLOCKS, NUM_NEW, FourRanks, assert_as_transformers
from tiny_models import make_checkpoint

from labkit.cluster.pool import Pool as RankPool
from labkit.engine.core import EngineDown, EngineSettings
from labkit.engine.request import Request, SamplingParams
from labkit.layout import Deployment, kv_bytes_per_token, read_layout
from labkit.model.spec import ModelSpec

pytestmark = pytest.mark.engine
DEGREES = ["tp1", "tp2", "tp4", "pp2", "tp4xdcp2"]
ALL_PAIRS = [f"prefill:{one},decode:{other}" for one, other in product(DEGREES, DEGREES)]
FEW_PAIRS = ["prefill:tp1,decode:tp2", "prefill:pp2,decode:tp2", "prefill:dp2,decode:pp2"]
FAMILY = "qwen2-qkv-bias"
"""Two KV heads: tp4 holds copies, so dcp 2 has something to share out."""


class HandingRanks(FourRanks):
    def _tight_bytes(self, layout: Deployment, spec: ModelSpec) -> int:  # type: ignore[override]
        """The poorest rank of all has room for just so many blocks."""
        assert self.engine is not None
        tokens = NUM_BLOCKS * BLOCK_SIZE
        return max(
            record.weights + tokens * kv_bytes_per_token(pool.layout, spec, record.rank - pool.first_rank, 4)
            for record in self.engine.state()["memory"]
            for pool in layout.pools
            if record.rank in pool.ranks
        )


def made(folder: Path, num_ranks: int) -> HandingRanks:
    ranks = HandingRanks(folder)
    if num_ranks != 4:
        config = replace(ranks.pool.config, num_ranks=num_ranks)
        ranks.pool = RankPool(
            config,
            lambda rank, message: ranks.engine.on_message(rank, message),
            lambda failure: ranks.engine.on_failure(failure),
            lambda state: ranks.engine.on_pool_state(state),
        )
    return ranks


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HandingRanks]:
    ranks = made(tmp_path_factory.mktemp("pool"), 4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HandingRanks]:
    ranks = made(tmp_path_factory.mktemp("pool"), 8)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints"), FAMILY)


def assert_handed_and_as_transformers(ranks: HandingRanks, folder: Path, text: str) -> None:
    answers = ranks.serve(folder, read_layout(text))
    for request, outputs in answers:
        assert_as_transformers(folder, request, outputs)
    assert len([event for event in ranks.events if event["event"] == "handoff"]) == len(ASKED) + 1


@pytest.mark.parametrize("text", FEW_PAIRS)
def test_a_pair_of_pools_gives_what_transformers_gives(four: HandingRanks, folder: Path, text: str) -> None:
    assert_handed_and_as_transformers(four, folder, text)


@pytest.mark.slow
@pytest.mark.parametrize("text", ALL_PAIRS)
def test_every_pair_of_pools_gives_what_transformers_gives(eight: HandingRanks, folder: Path, text: str) -> None:
    assert_handed_and_as_transformers(eight, folder, text)


def test_a_rank_killed_in_the_middle_of_a_handoff_is_named_and_the_pool_serves_again(
    four: HandingRanks, folder: Path
) -> None:
    """The decode rank is stopped, so that the transfer cannot end, and then killed."""

    async def scenario() -> None:
        engine = four.engine
        assert engine is not None
        await engine.switch(EngineSettings(layout=read_layout("prefill:tp2,decode:tp1"), memory_per_rank=2**26))
        events = four.events
        os.kill(four.pool.pids[2], signal.SIGSTOP)
        params = SamplingParams(NUM_NEW, temperature=0.0, ignore_eos=True)
        stream = engine.submit(Request("stuck", tuple(ASKED[4]), params, time.monotonic_ns()))
        while not engine._dispatcher._handoffs.moving:
            await asyncio.sleep(0.005)
        began = time.monotonic()
        os.kill(four.pool.pids[2], signal.SIGKILL)
        with pytest.raises(EngineDown, match="(?i)rank 2"):
            _ = [output async for output in stream]
        assert time.monotonic() - began < 5
        assert [event["rank"] for event in events if event["event"] == "failure"] == [2]
        async with asyncio.timeout(40):
            while engine.state()["state"] != "ready":
                await asyncio.sleep(0.05)
        again = engine.submit(Request("again", tuple(ASKED[4]), params, time.monotonic_ns()))
        assert len([token async for output in again for token in output.token_ids]) == NUM_NEW

    four.runner.run(asyncio.wait_for(scenario(), 90))
