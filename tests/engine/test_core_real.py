"""The engine on two real ranks under torchrun: the same greedy tokens under every layout and mishap."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from real_ranks import RealRanks

from labkit.engine.bringup import SwitchRefused
from labkit.engine.core import EngineDown, EngineSettings, Output, RequestStream
from labkit.engine.messages import Fault
from labkit.engine.request import FinishReason
from labkit.layout import Layout
from labkit.model.spec import load_spec

pytestmark = pytest.mark.engine
MODEL = "lab-5m"
SPEC = load_spec(MODEL)
MIB = 2**20


class RealHouse(RealRanks):
    """One pool of two ranks for the whole file; each test gives it the layout that it wants."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir, num_ranks=2, step_timeout_s=5.0)
        self.run(self.stand(MODEL, settings("tp1")))

    async def answers(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        return await asyncio.gather(*[read(self.ask(prompt, max_tokens)) for prompt in prompts])

    async def told_of(self, stream: RequestStream) -> dict[str, Any]:
        async with asyncio.timeout(10):
            while True:
                for event in self.events:
                    if event["event"] == "request" and event["request_id"] == stream.request.id:
                        return event
                await asyncio.sleep(0.01)


async def read(stream: RequestStream) -> list[int]:
    return [token async for output in stream for token in output.token_ids]


def prompts(count: int, longest: int) -> list[list[int]]:
    draw = random.Random(count)
    lengths = [1 + i * (longest - 1) // max(1, count - 1) for i in range(count)]
    return [[draw.randrange(SPEC.vocab_size) for _ in range(length)] for length in lengths]


def settings(slug: str, **changes: Any) -> EngineSettings:
    """With a small KV cache, which is walked after every step."""
    return EngineSettings(**{"layout": Layout.parse(slug), "memory_per_rank": 64 * MIB, **changes})


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealHouse]:
    made = RealHouse(tmp_path_factory.mktemp("pool"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def truth(house: RealHouse) -> list[list[int]]:
    """Greedy answers to `prompts(6, 90)`, each asked alone on one rank, with nothing reused."""

    async def one_by_one() -> list[list[int]]:
        await house.engine.switch(settings("tp1", prefix_cache=False))
        return [await read(house.ask(prompt, 24)) for prompt in prompts(6, 90)]

    return house.run(one_by_one())


@pytest.mark.parametrize("slug", ["tp1", "tp2", "dp2", "pp2"])
@pytest.mark.parametrize("fabric", ["shm", "gloo"])
def test_every_layout_and_fabric_gives_the_same_greedy_tokens(
    house: RealHouse, truth: list[list[int]], slug: str, fabric: str
) -> None:
    async def scenario() -> None:
        await house.engine.switch(settings(slug, fabric=fabric, max_num_batched_tokens=64))
        assert await house.answers(prompts(6, 90), 24) == truth
        assert await house.answers(prompts(6, 90), 24) == truth  # now with prefix hits

    house.run(scenario())


def test_requests_in_flight_at_a_switch_get_the_same_tokens_and_are_marked(
    house: RealHouse, truth: list[list[int]]
) -> None:
    async def scenario() -> None:
        await house.engine.switch(settings("tp1"))
        streams = [house.ask(prompt, 24) for prompt in prompts(6, 90)]
        readers = [asyncio.create_task(read(stream)) for stream in streams]
        for slug in ("tp2", "dp2"):
            while not streams[0].request.output:
                await asyncio.sleep(0.001)
            report = await house.engine.switch(settings(slug))
            assert report.ready_s < 5
        assert await asyncio.gather(*readers) == truth
        assert (await house.told_of(streams[-1]))["requeued"]

    house.run(scenario())


def test_a_full_cache_preempts_and_the_tokens_stay_the_same(house: RealHouse, truth: list[list[int]]) -> None:
    async def scenario() -> None:
        weights = await weights_of(house, "tp1")
        tight = settings("tp1", admission="vllm", memory_per_rank=weights + 12 * block_bytes("tp1"))
        await house.engine.switch(tight)
        assert house.engine.state()["replicas"][0]["kv_total_blocks"] < 16
        streams = [house.ask(prompt, 24) for prompt in prompts(6, 90)]
        assert await asyncio.gather(*map(read, streams)) == truth
        told = [await house.told_of(stream) for stream in streams]
        assert sum(event["num_preemptions"] for event in told) > 0

    house.run(scenario())


async def weights_of(house: RealHouse, slug: str) -> int:
    await house.engine.switch(settings(slug))
    return max(record.weights for record in house.engine.state()["memory"])


def block_bytes(slug: str) -> int:
    return 16 * 2 * SPEC.num_layers * SPEC.num_kv_heads * SPEC.head_dim * 4 // Layout.parse(slug).tp


def test_a_model_that_needs_two_ranks_is_refused_on_one_and_stands_on_two(
    house: RealHouse, truth: list[list[int]]
) -> None:
    async def scenario() -> None:
        budget = await weights_of(house, "tp1") - MIB
        await house.engine.switch(settings("tp2", memory_per_rank=budget))
        with pytest.raises(SwitchRefused, match=r"rank 0.*Layouts that fit: TP2\b"):
            await house.engine.switch(settings("tp1", memory_per_rank=budget))
        assert house.engine.state()["layout"] == "tp2"
        assert await house.answers(prompts(6, 90), 24) == truth

    house.run(scenario())


def test_a_cancelled_request_leaves_nothing_behind(house: RealHouse) -> None:
    async def scenario() -> None:
        await house.engine.switch(settings("tp2"))
        stream = house.ask(prompts(2, 50)[1], 500)
        await anext(stream)
        house.engine.cancel(stream.request.id)
        assert [output async for output in stream][-1].finish_reason is FinishReason.ABORT
        assert (await house.told_of(stream))["finish_reason"] == "abort"
        (replica,) = house.engine.state()["replicas"]
        assert (replica["running"], replica["kv_used_blocks"]) == (0, 0)

    house.run(scenario())


@pytest.mark.parametrize("num_tokens", [64, 512])
def test_the_time_in_a_pipeline_is_accounted_for_through_its_stages(house: RealHouse, num_tokens: int) -> None:
    """A prompt in chunks that follow each other, or in one; others decode beside it."""

    async def scenario() -> None:
        await house.engine.switch(settings("pp2", max_num_batched_tokens=num_tokens, prefix_cache=False))
        others = [asyncio.create_task(read(house.ask(prompt, 30))) for prompt in prompts(3, 20)]
        stream = house.ask(prompts(2, 400)[1], 20)
        await read(stream)
        await asyncio.gather(*others)
        event = await house.told_of(stream)
        for prefix, span in (
            ("", event["first_end_ns"] - event["received_ns"]),
            ("decode_", event["last_end_ns"] - event["first_end_ns"]),
        ):
            parts = [event[f"{prefix}{part}_ns"] for part in ("queue", "compute", "wait", "transfer")]
            assert abs(sum(parts) - span) < 0.01 * span
            assert parts[1] > 0 and parts[3] > 0
        await house.engine.settle()
        steps = [step for told in house.events if told["event"] == "steps" for step in told["steps"]]
        first, last = zip(*[step.idle_ns for step in steps if step.layout == "pp2"], strict=True)
        assert sum(first) == 0 < sum(last), "the last stage waits for the first, which waits for nobody"

    house.run(scenario())


def test_the_blocks_of_a_pipeline_are_those_of_its_poorest_stage(house: RealHouse) -> None:
    """lab-5m in 2 and 4 layers: the last stage's blocks are twice as large."""

    async def scenario() -> None:
        await house.engine.switch(settings("pp2+split=2-4"))
        weights = {record.rank: record.weights for record in house.engine.state()["memory"]}
        budget = max(weights.values()) + 4 * MIB
        await house.engine.switch(settings("pp2+split=2-4", memory_per_rank=budget))
        per_layer = 16 * 2 * SPEC.num_kv_heads * SPEC.head_dim * 4
        fit = [(budget - weights[rank]) // (per_layer * layers) - 1 for rank, layers in ((0, 2), (1, 4))]
        (replica,) = house.engine.state()["replicas"]
        assert replica["kv_total_blocks"] == min(fit) < max(fit)

    house.run(scenario())


def test_the_time_on_the_server_is_accounted_for_with_wait_and_transfer(house: RealHouse) -> None:
    async def scenario() -> None:
        await house.engine.switch(settings("tp2", max_num_batched_tokens=64))
        stream = house.ask(prompts(2, 200)[1], 20)
        await read(stream)
        event = await house.told_of(stream)
        parts = [event[f"{part}_ns"] for part in ("queue", "compute", "wait", "transfer")]
        until_first = event["first_end_ns"] - event["received_ns"]
        assert all(part > 0 for part in parts)
        assert abs(sum(parts) - until_first) < 0.01 * until_first
        decode = [event[f"decode_{part}_ns"] for part in ("queue", "compute", "wait", "transfer")]
        span = event["last_end_ns"] - event["first_end_ns"]
        assert abs(sum(decode) - span) < 0.01 * span
        await asyncio.sleep(0.15)
        steps = [step for told in house.events if told["event"] == "steps" for step in told["steps"]]
        assert steps[-1].num_collectives > 0 and steps[-1].ranks == [0, 1]
        assert any(told["event"] == "collectives" for told in house.events)

    house.run(scenario())


def test_a_rank_that_raises_is_named_and_the_same_layout_comes_back(
    house: RealHouse, truth: list[list[int]]
) -> None:
    async def scenario() -> None:
        await house.engine.switch(settings("tp2"))
        stream = house.ask(prompts(2, 50)[1], 2000)
        await anext(stream)
        began = time.monotonic()
        house.pool.send(1, Fault("raise"))
        with pytest.raises(EngineDown, match="Rank 1 raised RuntimeError"):
            await read(stream)
        assert time.monotonic() - began < 5
        async with asyncio.timeout(40):
            while house.engine.state()["state"] != "ready":
                await asyncio.sleep(0.05)
        assert house.engine.state()["layout"] == "tp2"
        assert await house.answers(prompts(6, 90), 24) == truth

    house.run(scenario())


@pytest.mark.slow
def test_a_rank_that_hangs_alone_is_named_and_the_same_layout_comes_back(house: RealHouse) -> None:
    """Nobody waits for it in a collective, and its sockets stay open: only the bound on a step can tell."""

    async def scenario() -> None:
        await house.engine.switch(settings("tp1"))
        before = await house.answers(prompts(1, 17), 4)
        house.pool.send(0, Fault("hang"))
        began = time.monotonic()
        with pytest.raises(EngineDown, match="Rank 0 has not answered a step within 5 s"):
            await house.answers(prompts(1, 17), 4)
        assert 5.0 <= time.monotonic() - began < 8.0
        async with asyncio.timeout(40):
            while house.engine.state()["state"] != "ready":
                await asyncio.sleep(0.05)
        assert await house.answers(prompts(1, 17), 4) == before

    house.run(scenario())


def test_what_tp_ranks_have_read_is_what_one_of_them_drew(house: RealHouse) -> None:
    """Without a seed and far from greedy: were each rank to draw for itself, their caches would hold different
    texts, and what TP2 thinks of its own text would not be what one rank alone thinks of it.
    """
    prompt = prompts(1, 5)[0]

    async def drawn() -> tuple[list[int], list[float]]:
        outputs = [output async for output in house.ask(prompt, 12, temperature=5.0, logprobs=0)]
        return _tokens(outputs), [chosen for output in outputs for chosen, _ in output.logprobs or ()]

    async def alone(tokens: list[int]) -> list[float]:
        each = []
        for length, token in enumerate(tokens):
            stream = house.ask([*prompt, *tokens[:length]], 1, logprobs=SPEC.vocab_size)
            each += [dict(row)[token] async for output in stream for _, row in output.logprobs or ()]
        return each

    async def scenario() -> None:
        await house.engine.switch(settings("tp2"))
        tokens, together = await drawn()
        again, _ = await drawn()
        assert tokens != again, "two unseeded draws at temperature 5 agree: this is no draw"
        await house.engine.switch(settings("tp1"))
        assert await alone(tokens) == pytest.approx(together, abs=1e-3)

    house.run(scenario())


def _tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]
