"""A house of an engine and ranks that compute with integers: every answer is known beforehand, exactly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from arithmetic_ranks import ArithmeticPool, answer_to

from labkit.engine.core import Engine, EngineSettings, RequestStream
from labkit.engine.request import Request, SamplingParams
from labkit.layout import Layout
from labkit.model.spec import load_spec

SPEC = load_spec("lab-5m")
SMALL = EngineSettings(block_size=4, max_num_batched_tokens=32, max_num_seqs=8)


class House:
    """An engine on two integer ranks, and everything that it has told."""

    def __init__(self, num_ranks: int = 2, step_timeout_s: float = 60.0, **pool) -> None:
        self.events: list[dict] = []
        self.pool = ArithmeticPool(num_ranks, **pool)
        self.engine = Engine(
            self.pool, "lab-5m", SPEC, self.events.append, step_timeout_s=step_timeout_s, check=True
        )
        self.pool.on_message, self.pool.on_failure = self.engine.on_message, self.engine.on_failure

    def ask(self, name: str, prompt: Sequence[int] | int = 10, max_tokens: int = 6, **params) -> RequestStream:
        tokens = tuple(range(3, 3 + prompt)) if isinstance(prompt, int) else tuple(prompt)
        settings = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)
        return self.engine.submit(Request(name, tokens, settings, time.monotonic_ns(), run_id="run"))

    def told(self, kind: str) -> list[dict]:
        return [event for event in self.events if event["event"] == kind]

    async def settled(self, num_requests: int) -> list[dict]:
        """The `request` events, once so many have been told."""
        async with asyncio.timeout(5):
            while len(self.told("request")) < num_requests:
                await asyncio.sleep(0.001)
        return self.told("request")


async def read(stream: RequestStream) -> list[int]:
    return [token async for output in stream for token in output.token_ids]


def expected(stream: RequestStream) -> list[int]:
    return answer_to(stream.request.prompt, stream.request.params.max_tokens)


def in_house(scenario: Callable[[House], Awaitable[None]], settings: EngineSettings = SMALL, **pool) -> House:
    """Run the scenario against a started engine; nothing may be left of its requests."""

    async def run() -> House:
        house = House(**pool)
        await house.engine.start(settings)
        await scenario(house)
        await house.engine.stop()
        assert house.engine.state()["requests_in_flight"] == 0
        return house

    return asyncio.run(asyncio.wait_for(run(), 30))


def layout(text: str, **settings) -> EngineSettings:
    return EngineSettings(**{**SMALL.__dict__, "layout": Layout.parse(text), **settings})


async def until_ready(house: House) -> None:
    async with asyncio.timeout(5):
        while house.engine.state()["state"] != "ready":
            await asyncio.sleep(0.001)
