"""What the engine tells of requests, steps and queues, over ranks that compute with integers."""

from __future__ import annotations

import asyncio

from house import House, in_house, layout, read


def test_a_request_s_time_on_the_server_is_accounted_for_whole() -> None:
    async def scenario(house: House) -> None:
        await asyncio.gather(read(house.ask("long", 80, max_tokens=5)), read(house.ask("short", max_tokens=1)))
        for event in await house.settled(2):
            until_first = sum(event[f"{part}_ns"] for part in ("queue", "compute", "wait", "transfer"))
            assert until_first == event["first_end_ns"] - event["received_ns"]
            after = sum(event[f"decode_{part}_ns"] for part in ("queue", "compute", "wait", "transfer"))
            assert after == event["last_end_ns"] - event["first_end_ns"]
            assert event["received_ns"] < event["first_start_ns"] < event["first_end_ns"] <= event["finished_ns"]
        long = next(event for event in house.told("request") if event["request_id"] == "long")
        assert long["compute_ns"] == 3 * 1000  # three chunks of a µs each
        assert (long["prompt_tokens"], long["output_tokens"], long["run_id"]) == (80, 5, "run")

    in_house(scenario, layout("tp2"), step_s=0.002)


def test_steps_are_told_by_the_tenth_of_a_second_with_all_their_ranks() -> None:
    async def scenario(house: House) -> None:
        await read(house.ask("a", 20, max_tokens=4))
        await asyncio.sleep(0.15)
        (event,) = house.told("steps")
        steps = event["steps"]
        assert event["crossings"] == [], "these ranks hand nothing over"
        assert [step.prefill_tokens for step in steps] == [20, 0, 0, 0]
        assert [step.context_tokens for step in steps] == [0, 20, 21, 22]
        assert all(step.ranks == [0, 1] and step.compute_ns == [1000, 1000] for step in steps)
        assert all(step.start_ns < step.end_ns and step.run_id == "run" for step in steps)

    in_house(scenario, layout("tp2"))


def test_queues_are_told_while_there_is_work_and_not_when_idle() -> None:
    async def scenario(house: House) -> None:
        await asyncio.sleep(0.15)
        assert house.told("engine") == []
        stream = house.ask("a", max_tokens=30)
        await read(stream)
        await asyncio.sleep(0.3)
        num_beats = len(house.told("engine"))
        assert house.told("engine")[0]["replicas"][0]["running"] == 1
        assert house.told("engine")[-1]["replicas"][0]["running"] == 0
        await asyncio.sleep(0.3)
        assert len(house.told("engine")) == num_beats

    in_house(scenario, step_s=0.01)
