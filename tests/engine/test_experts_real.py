"""Experts placed by what was measured, on real ranks: the same text, and no straggler."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hard_batch import ASKED, answer_all, assert_as_transformers, hard_settings, serve
from real_ranks import RealRanks
from tiny_models import make_checkpoint

from labkit.engine.core import EngineSettings
from labkit.layout import Layout
from labkit.load.schedule import make_schedule
from labkit.load.workload import load_workload

pytestmark = pytest.mark.engine
LAYOUT = Layout.parse("dp2xep2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints"), "mixtral")


@pytest.mark.parametrize("fabric", ["shm", "gloo"])
def test_measured_placement_with_copies_gives_the_same_text(four: RealRanks, folder: Path, fabric: str) -> None:
    serve(four, folder, LAYOUT)  # what is measured
    placed = hard_settings(LAYOUT, expert_placement="measured", expert_copies=3, fabric=fabric)
    four.run(four.engine.switch(placed))
    experts = four.engine.state()["experts"]
    assert all(len(a) + len(b) == 11 for a, b in experts["placements"])
    assert max(experts["imbalance"]) < 1.1
    assert_as_transformers(folder, four.run(answer_all(four, ASKED)))


def test_skewed_prompts_show_a_straggler_that_a_measured_placement_removes(four: RealRanks) -> None:
    """Rows by rank tell who is busy, whatever else the machine does; time goes with them, and is only looked at."""
    schedule = make_schedule(load_workload("skewed-experts"), num_requests=12, vocab_size=2048)
    prompts = [request.prompt_ids.tolist() for request in schedule.requests]

    async def scenario(placement: str) -> None:
        settings = EngineSettings(
            layout=LAYOUT, memory_per_rank=2**27, prefix_cache=False, expert_placement=placement
        )
        await four.stand("lab-moe-8x", settings)
        four.events.clear()
        await asyncio.gather(*[four.tokens(prompt, 4) for prompt in prompts])

    shares = {}
    for placement in ("plain", "measured"):
        four.run(scenario(placement))
        rows = dict.fromkeys((0, 1), 0)
        for step in four.steps():
            for rank, count in zip(step.ranks, step.expert_rows, strict=True):
                rows[rank] += count
        shares[placement] = max(rows.values()) / sum(rows.values())
    assert shares["plain"] > 0.75, "three quarters of the rows are one rank's"
    assert shares["measured"] < 0.6
