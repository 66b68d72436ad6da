"""Prefill apart from decode on real ranks: what transformers gives, whatever the two layouts; and a rank that is killed
in the middle of a handoff is named within five seconds."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from itertools import product
from pathlib import Path

import pytest
from hard_batch import ASKED, NUM_NEW, assert_as_transformers, hard_settings, serve
from real_ranks import RealRanks
from tiny_models import make_checkpoint

from labkit.engine.core import EngineDown
from labkit.layout import read_layout

pytestmark = pytest.mark.engine
DEGREES = ["tp1", "tp2", "tp4", "pp2", "tp4xdcp2"]
PAIRS = [f"prefill:{one},decode:{other}" for one, other in product(DEGREES, DEGREES)]
DENSE, EXPERTS = "qwen2-qkv-bias", "mixtral"
"""Two KV heads: tp4 holds copies, so dcp 2 has something to share out."""
FEW = [
    (DENSE, "prefill:tp1,decode:tp2"),
    (DENSE, "prefill:dp2,decode:pp2"),
    (EXPERTS, "prefill:tp2xep2,decode:dp2xep2"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {family: make_checkpoint(folder, family) for family in (DENSE, EXPERTS)}


def assert_handed_and_as_transformers(ranks: RealRanks, folder: Path, text: str) -> None:
    assert_as_transformers(folder, serve(ranks, folder, read_layout(text)))
    handed = [event for event in ranks.events if event["event"] == "handoff"]
    assert len(handed) == len(ASKED) + 1 and all(event["bytes"] > 0 for event in handed if event["num_tokens"])
    assert any(event["num_tokens"] < len(ASKED[-1]) for event in handed)


@pytest.mark.parametrize(("family", "text"), FEW)
def test_a_pair_of_pools_gives_what_transformers_gives(
    four: RealRanks, folders: dict[str, Path], family: str, text: str
) -> None:
    assert_handed_and_as_transformers(four, folders[family], text)


@pytest.mark.slow
@pytest.mark.parametrize("text", PAIRS)
def test_every_pair_of_pools_gives_what_transformers_gives(
    eight: RealRanks, folders: dict[str, Path], text: str
) -> None:
    assert_handed_and_as_transformers(eight, folders[DENSE], text)


def test_a_rank_killed_in_the_middle_of_a_handoff_is_named_and_the_pool_serves_again(
    four: RealRanks, folders: dict[str, Path]
) -> None:
    """The decode rank is stopped, so that the transfer cannot end, and then killed."""

    async def scenario() -> None:
        await four.stand(str(folders[DENSE]), hard_settings(read_layout("prefill:tp2,decode:tp1")))
        four.events.clear()
        os.kill(four.pool.pids[2], signal.SIGSTOP)
        stream = four.ask(ASKED[4], NUM_NEW)
        while not four.engine._dispatcher._handoffs.moving:
            await asyncio.sleep(0.005)
        began = time.monotonic()
        os.kill(four.pool.pids[2], signal.SIGKILL)
        with pytest.raises(EngineDown, match="(?i)rank 2"):
            _ = [output async for output in stream]
        assert time.monotonic() - began < 5
        assert [event["rank"] for event in four.events if event["event"] == "failure"] == [2]
        await four.ready()
        assert len(await four.tokens(ASKED[4], NUM_NEW)) == NUM_NEW

    four.run(scenario())
