"""A switch of layout, over ranks that compute with integers: no answer is lost, and what is refused changes nothing."""

from __future__ import annotations

import asyncio

import pytest
from house import House, expected, in_house, layout, read

from labkit.engine.core import EngineDown, SwitchRefused
from labkit.engine.request import FinishReason
from labkit.layout import Layout, LayoutError


def test_requests_in_flight_at_a_switch_are_computed_again_and_marked() -> None:
    async def scenario(house: House) -> None:
        streams = [house.ask(f"r{i}", [i + 2] * 9, max_tokens=40) for i in range(5)]
        heads = [(await anext(stream)).token_ids for stream in streams]
        report = await house.engine.switch(layout("dp2", block_size=8))
        assert report.layout == Layout(dp=2)
        assert set(report.parts) == {"drain", "load", "groups", "warm"}
        assert (report.parts["load"], report.parts["groups"], report.parts["warm"]) == (0.01, 0.02, 0.03)
        late = house.ask("late")
        for head, stream in zip(heads, streams, strict=True):
            assert head + await read(stream) == expected(stream)
        assert await read(late) == expected(late)
        told = {event["request_id"]: event for event in await house.settled(6)}
        assert [told[f"r{i}"]["requeued"] for i in range(5)] == [True] * 5
        assert not told["late"]["requeued"]
        assert told["late"]["layout"] == "dp2"

    house = in_house(scenario)
    assert [event["layout"] for event in house.told("switch")] == ["tp1", "dp2"]
    assert {(configure.layout, configure.epoch) for configure in house.pool.configures} == {
        ("tp1", 1),
        ("dp2", 2),
    }


def test_idle_ranks_are_configured_too() -> None:
    async def scenario(house: House) -> None:
        await house.engine.switch(layout("tp1"))
        assert [configure.layout for configure in house.pool.configures] == ["tp2"] * 4 + ["tp1"] * 4

    in_house(scenario, layout("tp2"), num_ranks=4)


def test_a_request_that_comes_during_a_switch_waits_for_it() -> None:
    async def scenario(house: House) -> None:
        switch = asyncio.create_task(house.engine.switch(layout("tp2")))
        while house.engine.state()["state"] != "switching":
            await asyncio.sleep(0)
        waits, leaves = house.ask("waits"), house.ask("leaves")
        house.engine.cancel("leaves")
        await switch
        assert await read(waits) == expected(waits)
        assert await read(leaves) == []
        assert leaves.request.finish_reason is FinishReason.ABORT
        assert {event["request_id"]: event["requeued"] for event in await house.settled(2)}["waits"]

    in_house(scenario)


def test_a_replica_has_the_blocks_of_its_smallest_rank() -> None:
    async def scenario(house: House) -> None:
        house.pool.num_blocks = lambda configure, rank: [40, 30, 70, 60][rank]
        await house.engine.switch(layout("dp2xtp2"))
        assert [replica["kv_total_blocks"] for replica in house.engine.state()["replicas"]] == [30, 60]

    in_house(scenario, num_ranks=4)


def test_an_illegal_layout_is_refused_before_anything_is_touched() -> None:
    async def scenario(house: House) -> None:
        for slug in ("tp3", "dp4", "pp3"):
            with pytest.raises(LayoutError):
                await house.engine.switch(layout(slug))
        assert len(house.pool.configures) == 2
        assert house.engine.state()["state"] == "ready"

    in_house(scenario)


def test_a_layout_that_does_not_fit_is_refused_and_the_former_stands_again() -> None:
    async def scenario(house: House) -> None:
        house.pool.num_blocks = lambda configure, rank: -1 if configure.layout == "tp1" else 64
        stream = house.ask("a", max_tokens=30)
        head = (await anext(stream)).token_ids
        with pytest.raises(SwitchRefused, match=r"rank 0 is too small for tp1.*Layouts that fit: TP2\b"):
            await house.engine.switch(layout("tp1", memory_per_rank=13 * 2**20))
        state = house.engine.state()
        assert (state["state"], state["layout"]) == ("ready", "tp2")
        assert head + await read(stream) == expected(stream)

    in_house(scenario, layout("tp2"))


def test_a_request_too_large_for_the_new_layout_is_told_so() -> None:
    async def scenario(house: House) -> None:
        stream, small = house.ask("large", 100, max_tokens=100), house.ask("small", max_tokens=9)
        await anext(stream)
        house.pool.num_blocks = lambda configure, rank: 20
        await house.engine.switch(layout("dp2"))
        with pytest.raises(EngineDown, match="After the switch to dp2: The request needs 50 KV blocks"):
            await read(stream)
        assert await read(small) == expected(small)
        assert {event["finish_reason"] for event in await house.settled(2)} == {"error", "length"}

    in_house(scenario)


def test_two_switches_at_once_follow_each_other() -> None:
    async def scenario(house: House) -> None:
        reports = await asyncio.gather(house.engine.switch(layout("tp2")), house.engine.switch(layout("dp2")))
        assert [report.layout.slug for report in reports] == ["tp2", "dp2"]
        assert house.engine.state()["layout"] == "dp2"

    in_house(scenario)


def test_a_switch_goes_on_when_the_one_who_asked_goes_away() -> None:
    async def scenario(house: House) -> None:
        switch = asyncio.create_task(house.engine.switch(layout("tp2")))
        await asyncio.sleep(0)
        switch.cancel()
        await asyncio.sleep(0.05)
        assert (house.engine.state()["state"], house.engine.state()["layout"]) == ("ready", "tp2")

    in_house(scenario)
