"""A stage that is killed ends its replica within five seconds, by name, and the pool serves again afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from labkit.cluster.pool import Pool, PoolConfig
from labkit.engine.core import Engine, EngineDown, EngineSettings, RequestStream
from labkit.engine.request import Request, SamplingParams
from labkit.layout import Layout
from labkit.model.spec import load_spec

pytestmark = pytest.mark.engine
MODEL = "lab-5m"
SPEC = load_spec(MODEL)
PROMPT = tuple(range(3, 900))
SHORT = tuple(range(3, 20))


class Stages:
    """An engine on four real ranks."""

    def __init__(self, run_dir: Path) -> None:
        self.runner = asyncio.Runner()
        self.events: list[dict[str, Any]] = []
        config = PoolConfig(num_ranks=4, threads=1, device="cpu", backend="gloo", run_dir=run_dir)
        self.pool = Pool(
            config,
            lambda rank, message: self.engine.on_message(rank, message),
            lambda failure: self.engine.on_failure(failure),
            lambda state: self.engine.on_pool_state(state),
        )
        self.engine = Engine(self.pool, MODEL, SPEC, self.events.append, check=True)

    def ask(self, prompt: tuple[int, ...], max_tokens: int) -> RequestStream:
        params = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True)
        return self.engine.submit(Request(f"r{time.monotonic_ns()}", prompt, params, time.monotonic_ns()))

    async def answer(self) -> list[int]:
        return [token async for output in self.ask(SHORT, 8) for token in output.token_ids]

    async def ready(self) -> None:
        async with asyncio.timeout(40):
            while self.engine.state()["state"] != "ready":
                await asyncio.sleep(0.05)

    def close(self) -> None:
        self.runner.run(self.engine.stop())
        self.runner.close()


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    made = Stages(tmp_path_factory.mktemp("pool"))
    yield made
    made.close()


def settings(slug: str) -> EngineSettings:
    return EngineSettings(layout=Layout.parse(slug), memory_per_rank=64 << 20, max_num_batched_tokens=64)


@pytest.mark.parametrize(
    ("slug", "rank", "moment"),
    [("pp3", 1, "prefill"), ("pp2xtp2", 2, "decode"), ("dp2xpp2", 0, "decode")],
)
def test_a_killed_stage_ends_every_stream_by_name_and_the_pool_serves_again(
    stages: Stages, slug: str, rank: int, moment: str
) -> None:
    async def scenario() -> None:
        engine = stages.engine
        await (engine.switch if engine.state()["state"] == "ready" else engine.start)(settings(slug))
        before = await stages.answer()
        streams = [stages.ask(PROMPT, 400), stages.ask(SHORT, 400)]
        if moment == "decode":
            await anext(streams[0])
        else:
            while not 0 < streams[0].request.num_computed < len(PROMPT) - 1:
                await asyncio.sleep(0.001)
            assert not streams[0].request.output
        began = time.monotonic()
        os.kill(stages.pool.pids[rank], signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDown, match=rf"Rank {rank} .*SIGKILL"):
                async for _ in stream:
                    pass
        assert time.monotonic() - began < 5
        await stages.ready()
        assert engine.state()["layout"] == slug
        assert await stages.answer() == before

    stages.runner.run(asyncio.wait_for(scenario(), 100))
