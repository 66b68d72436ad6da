"""The engine's ranks lent to a measurement: never beside a request, and never for long when one comes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from arithmetic_ranks import ArithmeticPool
from house import House, expected, in_house, layout, read, until_ready

from labkit.engine.bench_messages import Benched, BenchLink
from labkit.engine.measuring import EngineBusy
from labkit.engine.stream import EngineDown


def question(ranks: tuple[int, ...] = (0, 1), epoch: int = 1) -> BenchLink:
    return BenchLink(epoch, 1, list(ranks), "shm", "pingpong", 64, False, "float32", 1, 1, True)


@pytest.fixture(autouse=True)
def answering(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Integer ranks that answer a measurement with their own number, unless they are told to be silent."""
    kept, told = ArithmeticPool.send, SimpleNamespace(silent=False, asked=[])

    def send(pool: ArithmeticPool, rank: int, message: Any) -> None:
        if not isinstance(message, BenchLink):
            return kept(pool, rank, message)
        told.asked.append((rank, message.ranks))
        if not told.silent:
            answer = Benched(message.epoch, rank, [rank + 1], 0)
            asyncio.get_running_loop().call_soon(pool.on_message, rank, answer)

    monkeypatch.setattr(ArithmeticPool, "send", send)
    return told


def test_every_rank_answers_and_a_request_afterwards_is_served() -> None:
    async def scenario(house: House) -> None:
        async with house.engine.measuring() as ranks:
            answers = await ranks.ask(question(epoch=ranks.epoch))
        assert {rank: answer.times_ns for rank, answer in answers.items()} == {0: [1], 1: [2]}
        stream = house.ask("after")
        assert await read(stream) == expected(stream)

    in_house(scenario, layout("tp2"))


def test_it_is_refused_while_requests_run() -> None:
    async def scenario(house: House) -> None:
        streams = [house.ask(f"r{i}", max_tokens=20) for i in range(2)]
        await anext(streams[0])
        with pytest.raises(EngineBusy, match="2 requests run, which a measurement would disturb"):
            async with house.engine.measuring():
                raise AssertionError("lent while requests ran")
        for stream in streams:
            await read(stream)

    in_house(scenario)


def test_a_request_that_comes_waits_and_the_measurement_gives_way() -> None:
    async def scenario(house: House) -> None:
        async with house.engine.measuring() as ranks:
            await ranks.ask(question(epoch=ranks.epoch))
            stream = house.ask("came")
            await asyncio.sleep(0.02)
            assert house.pool.log == [], "no step beside a measurement"
            with pytest.raises(EngineBusy, match="1 request came meanwhile"):
                await ranks.ask(question(epoch=ranks.epoch))
            await ranks.ask(question((), ranks.epoch))
        assert await read(stream) == expected(stream) and not stream.request.requeued

    in_house(scenario, layout("dp2"))


def test_a_rank_that_ends_takes_the_measurement_with_it_and_the_engine_comes_back(answering: SimpleNamespace) -> None:
    async def scenario(house: House) -> None:
        answering.silent = True
        with pytest.raises(EngineDown, match="Rank 1"):
            async with house.engine.measuring() as ranks:
                asyncio.get_running_loop().call_later(0.01, house.pool.die, 1)
                await ranks.ask(question(epoch=ranks.epoch))
        await until_ready(house)
        stream = house.ask("after")
        assert await read(stream) == expected(stream)

    in_house(scenario, layout("tp2"))


def test_without_ranks_there_is_nothing_to_lend() -> None:
    async def scenario(house: House) -> None:
        await house.engine.stop()
        with pytest.raises(EngineDown):
            async with house.engine.measuring():
                raise AssertionError("lent without ranks")

    in_house(scenario)
