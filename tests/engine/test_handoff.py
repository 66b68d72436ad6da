"""Prefill apart from decode, over ranks that compute with integers: blocks live until request and transfer have
ended."""

from __future__ import annotations

import asyncio

import pytest
from arithmetic_ranks import answer_to
from house import SMALL, House, expected, in_house, read

from labkit.engine.core import EngineDown, EngineSettings
from labkit.engine.request import RequestRefused
from labkit.layout import LayoutError, read_layout


def pools(text: str, **settings) -> EngineSettings:
    return EngineSettings(**{**SMALL.__dict__, "layout": read_layout(text), **settings})


@pytest.mark.parametrize(
    "text",
    ["prefill:tp1,decode:tp1", "prefill:tp2,decode:tp1", "prefill:dp2,decode:tp2", "prefill:tp1,decode:dp3",
     "prefill:pp2,decode:tp2", "any:tp1,prefill:tp1,decode:tp2", "decode:tp1,prefill:tp2"],
)  # fmt: skip
def test_answers_are_those_of_one_layout(text: str) -> None:
    async def scenario(house: House) -> None:
        streams = [house.ask(f"r{i}", [i + 1] * (3 + 5 * i), 2 + i) for i in range(8)]
        answers = await asyncio.gather(*map(read, streams))
        assert answers == [expected(stream) for stream in streams]
        events = await house.settled(8)
        handed = {event["request_id"] for event in house.told("handoff")}
        assert handed and all(event["handoff_bytes"] > 0 for event in events if event["request_id"] in handed)
        if "any" not in text:
            assert len(handed) == 8

    in_house(scenario, pools(text), num_ranks=4)


def test_a_first_token_that_ends_the_answer_needs_no_handoff() -> None:
    async def scenario(house: House) -> None:
        stream = house.ask("one", 9, 1)
        assert await read(stream) == expected(stream)
        assert not house.told("handoff")

    in_house(scenario, pools("prefill:tp1,decode:tp1"))


@pytest.mark.parametrize("first_token", ["decode", "prefill"])
def test_the_first_token_comes_with_its_kv_or_before_it(first_token: str) -> None:
    async def scenario(house: House) -> None:
        house.pool.move_s = 0.1
        stream = house.ask("one", 9, 3)
        piece = await anext(aiter(stream))
        assert bool(house.told("handoff")) == (first_token == "decode")
        assert piece.token_ids + await read(stream) == expected(stream)
        (times,) = await house.settled(1)
        assert (times["released_ns"] > 0) == (first_token == "decode")
        assert times["handoff_ns"] >= 0.1e9
        after_first = times["last_end_ns"] - times["first_end_ns"]
        assert times["handoff_ns"] + times["decode_queue_ns"] <= after_first, "no time is counted twice"

    in_house(scenario, pools("prefill:tp1,decode:tp1", first_token=first_token))


def test_the_decode_pool_admits_before_the_transfer_starts() -> None:
    """Room for one request at a time: the second one's KV does not move before the first has gone."""

    async def scenario(house: House) -> None:
        streams = [house.ask(f"r{i}", 20, 12) for i in range(2)]
        answers = await asyncio.gather(*map(read, streams))
        assert answers == [expected(stream) for stream in streams]
        first, second = await house.settled(2)
        handoffs = house.told("handoff")
        assert handoffs[1]["start_ns"] >= first["last_end_ns"] > handoffs[0]["end_ns"]
        assert second["handoff_queue_ns"] > 0

    def blocks(configure, rank: int) -> int:
        return 64 if rank == 0 else 9

    async def small(house: House) -> None:
        house.pool.num_blocks = blocks
        await house.engine.switch(pools("prefill:tp1,decode:tp1"))
        await scenario(house)

    in_house(small, pools("tp1"), step_s=0.002)


def test_who_goes_away_in_the_middle_of_a_transfer_leaves_the_blocks_to_its_end() -> None:
    async def scenario(house: House) -> None:
        house.pool.move_s = 0.05
        house.ask("gone", 20, 12)
        async with asyncio.timeout(5):
            while ("move", 0) not in house.pool.log:
                await asyncio.sleep(0.001)
        house.engine.cancel("gone")
        used = [replica["kv_used_blocks"] for replica in house.engine.state()["replicas"]]
        assert min(used) >= 5, "both ends hold the prompt's five blocks: they are being read and written"
        others = [house.ask(f"r{i}", 20, 5) for i in range(4)]  # they would take the blocks, were they free
        assert await asyncio.gather(*map(read, others)) == [expected(stream) for stream in others]
        async with asyncio.timeout(5):
            while any(replica["kv_used_blocks"] for replica in house.engine.state()["replicas"]):
                await asyncio.sleep(0.001)

    in_house(scenario, pools("prefill:tp1,decode:tp1", prefix_cache=False))


def test_who_goes_away_before_the_transfer_gives_both_pools_their_blocks_back() -> None:
    async def scenario(house: House) -> None:
        house.pool.num_blocks = lambda configure, rank: 64 if rank == 0 else 9
        await house.engine.switch(pools("prefill:tp1,decode:tp1"))
        first, second = house.ask("first", 20, 16), house.ask("second", 20, 16)
        async with asyncio.timeout(5):
            while [house.engine.state()["replicas"][1][what] for what in ("running", "waiting")] != [1, 1]:
                await asyncio.sleep(0.001)
        house.engine.cancel("second")
        assert house.engine.state()["replicas"][1]["waiting"] == 0
        assert await read(first) == expected(first)
        assert all(not replica["running"] for replica in house.engine.state()["replicas"])
        assert len(house.told("handoff")) == 1 and second.request.finish_reason == "abort"

    in_house(scenario, pools("tp1"), step_s=0.002)


def test_a_decode_pool_that_is_full_preempts_and_computes_again_there() -> None:
    async def scenario(house: House) -> None:
        house.pool.num_blocks = lambda configure, rank: 64 if rank == 0 else 12
        await house.engine.switch(pools("prefill:tp1,decode:tp1", admission="vllm"))
        streams = [house.ask(f"r{i}", [i + 2] * 10, 16) for i in range(4)]
        assert await asyncio.gather(*map(read, streams)) == [expected(stream) for stream in streams]
        assert sum(event["num_preemptions"] for event in await house.settled(4)) > 0

    in_house(scenario, pools("tp1"))


@pytest.mark.parametrize("after", ["tp2", "prefill:tp1,decode:tp1"])
def test_a_switch_in_the_middle_loses_nothing(after: str) -> None:
    async def scenario(house: House) -> None:
        house.pool.move_s = 0.01
        house.pool.num_blocks = lambda configure, rank: 64 if rank == 0 else 14
        await house.engine.switch(pools("prefill:tp1,decode:tp1"))
        streams = [house.ask(f"r{i}", [i + 1] * 12, 8) for i in range(6)]
        async with asyncio.timeout(5):
            while len(house.told("handoff")) < 2:
                await asyncio.sleep(0.001)
        await house.engine.switch(pools(after, router="round-robin"))
        assert await asyncio.gather(*map(read, streams)) == [expected(stream) for stream in streams]

    in_house(scenario, pools("tp1"), step_s=0.001)


def test_a_rank_that_dies_in_the_middle_of_a_handoff_fails_every_stream_by_name() -> None:
    async def scenario(house: House) -> None:
        house.pool.move_s = 5.0
        stream = house.ask("one", 9, 3)
        async with asyncio.timeout(5):
            while ("move", 1) not in house.pool.log:
                await asyncio.sleep(0.001)
        house.pool.die(1)
        with pytest.raises(EngineDown, match="Rank 1 raised"):
            await read(stream)
        house.pool.move_s = 0.0
        async with asyncio.timeout(5):
            while house.engine.state()["state"] != "ready":
                await asyncio.sleep(0.001)
        again = house.ask("two", 9, 3)
        assert await read(again) == expected(again)

    in_house(scenario, pools("prefill:tp1,decode:tp1"))


def test_a_handoff_that_never_ends_is_noticed() -> None:
    async def scenario(house: House) -> None:
        stream = house.ask("one", 9, 3)
        house.pool.move_s = 60.0
        with pytest.raises(EngineDown, match="handoff of KV"):
            await read(stream)

    in_house(scenario, pools("prefill:tp1,decode:tp1"), step_timeout_s=0.2)


def test_what_the_decode_pool_can_never_hold_is_refused_at_the_door() -> None:
    async def scenario(house: House) -> None:
        house.pool.num_blocks = lambda configure, rank: 64 if rank == 0 else 5
        await house.engine.switch(pools("prefill:tp1,decode:tp1"))
        with pytest.raises(RequestRefused, match="the replica has 5"):
            house.ask("large", 20, 12)

    in_house(scenario, pools("tp1"))


def test_what_the_decode_pool_has_cached_does_not_move_again() -> None:
    async def scenario(house: House) -> None:
        for name in ("first", "again"):
            stream = house.ask(name, 22, 4)
            assert await read(stream) == answer_to(stream.request.prompt, 4)
        first, again = house.told("handoff")
        assert first["num_tokens"] == 22 and again["num_tokens"] == 2

    in_house(scenario, pools("prefill:tp1,decode:tp1"))


def test_long_prompts_have_a_pool_of_their_own() -> None:
    async def scenario(house: House) -> None:
        streams = [house.ask("short", 15, 3), house.ask("long", 16, 3), house.ask("longer", 40, 3)]
        assert await asyncio.gather(*map(read, streams)) == [expected(stream) for stream in streams]
        by_name = {event["request_id"]: event for event in await house.settled(3)}
        assert [by_name[name]["replica"] for name in ("short", "long", "longer")] == [0, 1, 1]
        assert "long from 16" in by_name["long"]["routed_because"]
        assert "under 16 tokens" in by_name["short"]["routed_because"]
        roles = [pool["role"] for pool in house.engine.state()["pools"]]
        assert roles == ["any", "long"]

    in_house(scenario, pools("any:tp1,long:tp2", long_prompt_tokens=16), num_ranks=3)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("prefill:tp4,decode:tp2", r"needs 4 \+ 2 = 6 ranks, and 4 are there"),
        ("prefill:tp2", "A prefill pool needs a decode pool beside it"),
        ("prefill:tp3,decode:tp1", "The prefill pool: TP3 is not allowed"),
        ("any:tp1,long", "has no role"),
    ],
)
def test_a_deployment_that_cannot_be_is_refused_with_a_sentence(text: str, sentence: str) -> None:
    async def scenario(house: House) -> None:
        with pytest.raises(LayoutError, match=sentence):
            await house.engine.switch(pools(text))

    in_house(scenario, pools("tp1"), num_ranks=4)
