"""A rank that holds some of the positions is killed: by name within five seconds, and the pool serves again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import pytest
from test_killed_stage import PROMPT, SHORT, Stages, settings

from labkit.engine.core import EngineDown

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    made = Stages(tmp_path_factory.mktemp("pool"))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("slug", "rank", "moment"),
    [("pcp2+ring", 1, "prefill"), ("pcp4xdcp4", 2, "decode"), ("pcp2xtp2", 3, "prefill")],
)
def test_a_killed_rank_ends_every_stream_by_name_and_the_pool_serves_again(
    stages: Stages, slug: str, rank: int, moment: str
) -> None:
    async def scenario() -> None:
        engine = stages.engine
        await (engine.switch if engine.state()["state"] == "ready" else engine.start)(settings(slug))
        before = await stages.answer()
        streams = [stages.ask(PROMPT, 100), stages.ask(SHORT, 100)]
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
