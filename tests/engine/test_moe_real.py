"""Mixtures of experts on real ranks under torchrun: ragged, chunked, with prefix hits, with forced preemption, and
with replicas that sleep while others work (the first prompt is asked alone).

What transformers gives is the measure, as for the dense families; the figures that a step leaves about its
experts are held against what a step must have done.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_parity_real import ASKED, HEAD, NUM_NEW, FourRanks, assert_as_transformers
from tiny_models import MOE_FAMILIES, SMALL, make_checkpoint

from labkit.engine.core import Engine, EngineDown, EngineSettings
from labkit.engine.messages import Fault
from labkit.engine.request import Request, SamplingParams
from labkit.layout import Layout
from labkit.load.schedule import make_schedule
from labkit.load.workload import load_workload
from labkit.measure.records import StepRecord
from labkit.model.spec import load_spec

pytestmark = pytest.mark.engine
LAYOUTS = ["tp1", "tp2", "tp2xep2", "tp4xep4", "dp2xep2", "dp2xtp2xep4", "dp4xep4"]
REAL_FAMILIES = ["mixtral", "qwen2-moe-shared", "qwen3-moe-dense-layer"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FourRanks]:
    made = FourRanks(tmp_path_factory.mktemp("pool"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {family: make_checkpoint(folder, family) for family in MOE_FAMILIES}


def steps_of(ranks: FourRanks) -> list[StepRecord]:
    assert ranks.engine is not None
    ranks.runner.run(ranks.engine.settle())
    return [step for event in ranks.events if event["event"] == "steps" for step in event["steps"]]


@pytest.mark.parametrize("slug", LAYOUTS)
@pytest.mark.parametrize("family", REAL_FAMILIES)
def test_layout_gives_what_transformers_gives(
    ranks: FourRanks, folders: dict[str, Path], family: str, slug: str
) -> None:
    folder, layout = folders[family], Layout.parse(slug)
    answered = ranks.serve(folder, layout)
    for request, outputs in answered:
        assert_as_transformers(folder, request, outputs)
    told = [event for event in ranks.events if event["event"] == "request"]
    assert sum(event["cached_tokens"] for event in told) > 0, "no prefix was found in the cache"
    if layout.dp <= 2:
        assert sum(request.num_preemptions for request, _ in answered) > 0, "nothing was preempted"
    assert_experts_told(steps_of(ranks), folder, layout)


def assert_experts_told(steps: list[StepRecord], folder: Path, layout: Layout) -> None:
    """Every token goes to top_k experts in each MoE layer, and every row of it is computed somewhere, once."""
    spec = load_spec(folder)
    assert spec.moe is not None
    num_moe = sum(spec.is_moe_layer(layer) for layer in range(spec.num_layers))
    for step in steps:
        tokens = step.prefill_tokens + step.num_decode_seqs
        assert sum(step.expert_tokens) == tokens * num_moe * spec.moe.top_k
        assert len(step.expert_ns) == len(step.expert_wait_ns) == len(step.ranks) and step.num_dropped == 0
    rows, routed = (sum(sum(values) for values in found) for found in zip(
        *((step.expert_rows, step.expert_tokens) for step in steps), strict=True
    ))  # fmt: skip
    assert rows == routed * (layout.tp if layout.ep == 1 else 1)
    sent = sum(sum(step.expert_sent_bytes) for step in steps)
    waited = sum(sum(step.expert_wait_ns) for step in steps)
    assert (sent > 0, waited > 0) == (layout.ep > 1, layout.ep > 1)
    if layout.attention_dp:
        idle = [step for step in steps if step.prefill_tokens + step.num_decode_seqs == 0]
        assert idle and sum(sum(step.expert_rows) for step in idle) > 0, "who sleeps computes for the others"


@pytest.mark.parametrize("fabric", ["shm", "gloo"])
def test_measured_placement_with_copies_gives_the_same_text(
    ranks: FourRanks, folders: dict[str, Path], fabric: str
) -> None:
    folder = folders["mixtral"]
    layout = Layout.parse("dp2xep2")
    ranks.serve(folder, layout)  # what is measured
    assert ranks.engine is not None
    placed = EngineSettings(
        layout=layout, memory_per_rank=2**26, block_size=8, max_num_batched_tokens=20, max_num_seqs=8,
        expert_placement="measured", expert_copies=3, fabric=fabric,
    )  # fmt: skip
    ranks.runner.run(ranks.engine.switch(placed))
    experts = ranks.engine.state()["experts"]
    assert all(len(a) + len(b) == 11 for a, b in experts["placements"])
    assert max(experts["imbalance"]) < 1.1

    async def ask() -> list:
        return await asyncio.gather(*[ranks._answer(i, prompt) for i, prompt in enumerate(ASKED)])

    for request, outputs in ranks.runner.run(asyncio.wait_for(ask(), 60)):
        assert_as_transformers(folder, request, outputs)


async def skewed(ranks: FourRanks, num_requests: int) -> None:
    assert ranks.engine is not None
    schedule = make_schedule(load_workload("skewed-experts"), num_requests=num_requests, vocab_size=2048)

    async def one(index: int, prompt: tuple[int, ...]) -> None:
        params = SamplingParams(4, temperature=0.0, ignore_eos=True)
        request = Request(f"s{index}-{time.monotonic_ns()}", prompt, params, time.monotonic_ns())
        async for _ in ranks.engine.submit(request):
            pass

    await asyncio.gather(*[one(r.index, tuple(r.prompt_ids.tolist())) for r in schedule.requests])


def test_skewed_prompts_show_a_straggler_that_a_measured_placement_removes(ranks: FourRanks) -> None:
    """Rows by rank tell who is busy, whatever else the machine does; time goes with them, and is only looked at."""
    ranks.engine = Engine(ranks.pool, "lab-moe-8x", load_spec("lab-moe-8x"), ranks.events.append, check=True)
    plain = EngineSettings(layout=Layout.parse("dp2xep2"), memory_per_rank=2**27, prefix_cache=False)
    shares = {}
    for settings in (plain, replace(plain, expert_placement="measured")):
        start = ranks.engine.switch if shares else ranks.engine.start
        ranks.runner.run(asyncio.wait_for(start(settings), 60))
        ranks.events.clear()
        ranks.runner.run(asyncio.wait_for(skewed(ranks, 12), 60))
        rows = dict.fromkeys((0, 1), 0)
        for step in steps_of(ranks):
            for rank, count in zip(step.ranks, step.expert_rows, strict=True):
                rows[rank] += count
        shares[settings.expert_placement] = max(rows.values()) / sum(rows.values())
    assert shares["plain"] > 0.75, "three quarters of the rows are one rank's"
    assert shares["measured"] < 0.6


def test_a_rank_that_raises_in_a_shared_exchange_is_named_within_five_seconds(
    ranks: FourRanks, folders: dict[str, Path]
) -> None:
    """Rank 1 is the replica that sleeps; rank 0, whose request it is, stands in an exchange and is not blamed."""
    ranks.serve(folders["mixtral"], Layout.parse("dp2xep2"))
    engine = ranks.engine
    assert engine is not None

    async def scenario() -> None:
        params = SamplingParams(2 * NUM_NEW, temperature=0.0, ignore_eos=True)
        stream = engine.submit(Request("alone", tuple(HEAD), params, time.monotonic_ns()))
        await anext(stream)
        began = time.monotonic()
        ranks.pool.send(1, Fault("raise"))
        with pytest.raises(EngineDown, match="Rank 1 raised RuntimeError"):
            async for _ in stream:
                pass
        assert time.monotonic() - began < 5
        async with asyncio.timeout(60):
            while engine.state()["state"] != "ready":
                await asyncio.sleep(0.05)
        request, outputs = await ranks._answer(0, HEAD)
        assert len(request.output) == NUM_NEW and len(outputs[0].logprobs[0][1]) == SMALL["vocab_size"]

    ranks.runner.run(asyncio.wait_for(scenario(), 80))
