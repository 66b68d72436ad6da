"""A rank ends, hangs or has no room: who it was is said, and the engine comes back."""

from __future__ import annotations

import asyncio
import time

import pytest
from house import House, expected, in_house, layout, read, until_ready

from labkit.engine.core import EngineDown, SwitchRefused


def test_a_dead_rank_ends_every_stream_with_its_name_and_the_engine_comes_back() -> None:
    async def scenario(house: House) -> None:
        streams = [house.ask(f"r{i}", max_tokens=200) for i in range(3)]
        await anext(streams[0])
        house.pool.die(1)
        for stream in streams:
            with pytest.raises(EngineDown, match="Rank 1 raised ValueError: no"):
                await read(stream)
        with pytest.raises(EngineDown, match="Rank 1 raised ValueError: no"):
            house.ask("now")
        failed = house.told("state")[-1]
        assert (failed["state"], failed["failure"]["rank"]) == ("failed", 1)
        await until_ready(house)
        assert house.engine.state()["failure"] is None
        again = house.ask("again")
        assert await read(again) == expected(again)
        told = await house.settled(4)
        assert [event["finish_reason"] for event in told] == ["error"] * 3 + ["length"]
        assert "Rank 1 raised" in told[0]["error"]

    house = in_house(scenario, layout("tp2"))
    states = [event["state"] for event in house.told("state")]
    assert states == ["starting", "starting", "ready", "failed", "restarting", "ready", "stopped"]
    assert house.told("failure")[0] | {"event": ""} == {
        "event": "",
        "rank": 1,
        "kind": "raised",
        "error": "Rank 1 raised ValueError: no.",
        "traceback": "Traceback …",
    }


@pytest.mark.parametrize(("slug", "said"), [("tp1", "Rank 0 has"), ("tp2", "Ranks 0, 1 have")])
def test_ranks_that_answer_no_step_are_named_after_the_bound_and_the_engine_comes_back(
    slug: str, said: str
) -> None:
    async def scenario(house: House) -> None:
        first = house.ask("first", max_tokens=3)
        assert await read(first) == expected(first)
        house.pool.silent = set(house.engine.settings.layout.replica_ranks(0))
        stream, began = house.ask("lost", max_tokens=3), time.monotonic()
        with pytest.raises(EngineDown, match=f"{said} not answered a step within 0.2 s"):
            await read(stream)
        assert 0.2 <= time.monotonic() - began < 2.0
        assert house.told("failure")[0]["kind"] == "hung"
        await until_ready(house)
        again = house.ask("again")
        assert await read(again) == expected(again)

    in_house(scenario, layout(slug), step_timeout_s=0.2)


def test_one_silent_replica_is_noticed_while_the_other_answers() -> None:
    async def scenario(house: House) -> None:
        house.pool.silent = {1}
        streams = [house.ask(f"r{i}", max_tokens=200) for i in range(2)]
        with pytest.raises(EngineDown, match="Rank 1 has not answered a step within 0.1 s"):
            await asyncio.gather(*map(read, streams))

    in_house(scenario, layout("dp2"), step_timeout_s=0.1, step_s=0.01)


def test_steps_that_come_back_in_time_are_left_alone_however_long_the_answer() -> None:
    async def scenario(house: House) -> None:
        stream = house.ask("long", max_tokens=60)
        assert await read(stream) == expected(stream)
        assert not house.told("failure")
        await asyncio.sleep(0.4)  # nothing is on its way: nobody is late
        assert not house.told("failure")

    in_house(scenario, step_timeout_s=0.3, step_s=0.01)


def test_a_rank_that_answers_no_switch_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.engine.bringup.SWITCH_TIMEOUT_S", 0.1)

    async def scenario(house: House) -> None:
        house.pool.silent = {1}
        with pytest.raises(EngineDown, match="Rank 1 has not answered a switch of layout within 0.1 s"):
            await house.engine.switch(layout("tp2"))
        await until_ready(house)
        assert house.engine.state()["layout"] == "tp1"

    in_house(scenario)


def test_a_rank_that_dies_during_a_switch_ends_the_switch_and_the_former_layout_returns() -> None:
    async def scenario(house: House) -> None:
        stream = house.ask("a", max_tokens=200)
        await anext(stream)
        switch = asyncio.create_task(house.engine.switch(layout("dp2")))
        await asyncio.sleep(0.005)
        house.pool.die(0)
        with pytest.raises(EngineDown, match="Rank 0 raised"):
            await switch
        with pytest.raises(EngineDown):
            await read(stream)
        await until_ready(house)
        assert house.engine.state()["layout"] == "tp2"

    in_house(scenario, layout("tp2"), step_s=0.05)


def test_a_pool_that_keeps_breaking_is_given_up_with_the_reason() -> None:
    async def scenario(house: House) -> None:
        async def no_restart() -> None:
            house.engine.on_pool_state("restarting")
            assert "Rank 1 raised" in house.engine.state()["message"]
            house.pool.restarts_left = 0
            raise RuntimeError("the ranks broke 3 times")

        house.pool.restart = no_restart
        house.pool.die(1)
        await asyncio.sleep(0.01)
        state = house.engine.state()
        assert state["state"] == "stopped"
        assert "Rank 1 raised ValueError: no. the ranks broke 3 times" in state["message"]
        with pytest.raises(EngineDown, match="broke 3 times"):
            house.ask("a")

    in_house(scenario)


def test_a_first_layout_that_does_not_fit_leaves_an_engine_that_can_be_given_another() -> None:
    async def run() -> None:
        house = House()
        house.pool.num_blocks = lambda configure, rank: -1 if configure.layout == "tp1" else 64
        with pytest.raises(SwitchRefused, match="rank 0 is too small"):
            await house.engine.start(layout("tp1"))
        assert house.engine.state()["state"] == "failed"
        with pytest.raises(EngineDown, match="too small"):
            house.ask("a")
        await house.engine.switch(layout("tp2"))
        stream = house.ask("b")
        assert await read(stream) == expected(stream)
        await house.engine.stop()

    asyncio.run(run())
