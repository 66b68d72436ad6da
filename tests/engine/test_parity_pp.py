"""Stages on four real ranks give what transformers gives: tokens exactly, logits within 1e-4.

Even and uneven splits, alone, beside tensor parallelism and in replicas; several steps are in flight, prompts are cut
into chunks that follow each other, prefixes are found in the cache, and sequences are preempted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_parity_real import FourRanks, assert_as_transformers
from tiny_models import make_checkpoint

from labkit.layout import Layout
from labkit.measure.records import StepRecord

pytestmark = pytest.mark.engine
NUM_LAYERS = 5
FAMILIES = [
    "llama-tied-llama3-rope",
    "llama-untied-biases",
    "qwen2-qkv-bias",
    "qwen3-qk-norm-own-head-dim",
    "mistral-window",
]
LAYOUTS = ["pp2", "pp3", "pp3+split=1-3-1", "pp4", "pp2xtp2", "dp2xpp2"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FourRanks]:
    made = FourRanks(tmp_path_factory.mktemp("pool"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {family: make_checkpoint(folder, family, num_hidden_layers=NUM_LAYERS) for family in FAMILIES}


@pytest.mark.parametrize("slug", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_give_what_transformers_gives(
    ranks: FourRanks, folders: dict[str, Path], family: str, slug: str
) -> None:
    folder, layout = folders[family], Layout.parse(slug)
    answered = ranks.serve(folder, layout)
    for request, outputs in answered:
        assert_as_transformers(folder, request, outputs)
    told = [event for event in ranks.events if event["event"] == "request"]
    assert sum(event["cached_tokens"] for event in told) > 0, "no prefix was found in the cache"
    if layout.dp == 1:
        assert sum(request.num_preemptions for request, _ in answered) > 0, "nothing was preempted"
    assert ranks.engine is not None
    ranks.runner.run(ranks.engine.settle())
    assert_several_in_flight(steps_of(ranks.events), layout)


def steps_of(events: list[dict[str, Any]]) -> list[StepRecord]:
    return [step for event in events if event["event"] == "steps" for step in event["steps"]]


def assert_several_in_flight(steps: list[StepRecord], layout: Layout) -> None:
    """A replica's steps overlap, as many as there are stages and no more, and come back in order."""
    mine = [step for step in steps if step.replica == 0]
    assert [step.step_id for step in mine] == sorted(step.step_id for step in mine)
    assert [step.end_ns for step in mine] == sorted(step.end_ns for step in mine)
    at_once = [sum(other.start_ns <= step.start_ns < other.end_ns for other in mine) for step in mine]
    assert max(at_once) == layout.pp
    for step in mine:
        first = [at for at, rank in enumerate(step.ranks) if layout.coords(rank).pp == 0]
        assert all(step.idle_ns[at] == 0 for at in first), "the first stage waits for nobody"
        assert step.in_flight_bytes > 0
