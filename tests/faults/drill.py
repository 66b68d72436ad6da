"""The drill: a rank is killed at a moment of a layout's work; by name within five seconds, and the pool serves again.

Two requests are on their way, a long prompt cut into chunks and a short one. One pool goes through all drills, and so
restarts more often than the three times in ten minutes that a pool allows itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from labkit.engine.core import EngineDown, EngineSettings, RequestStream
from labkit.layout import Layout
from tests.engine.real_ranks import RealRanks, real_ranks

PROMPT, SHORT = tuple(range(3, 900)), tuple(range(3, 20))
NUM_NEW = 400
"""More than can be read before the rank is killed."""


@contextmanager
def ranks_to_drill(run_dir: Path) -> Iterator[RealRanks]:
    with pytest.MonkeyPatch.context() as patch, real_ranks(run_dir) as ranks:
        patch.setattr("labkit.cluster.pool.MAX_RESTARTS", 100)
        yield ranks


def settings(layout: Layout) -> EngineSettings:
    return EngineSettings(layout=layout, memory_per_rank=128 << 20, max_num_batched_tokens=64)


async def reach(stream: RequestStream, moment: str) -> None:
    """Until the long prompt is half read (prefill), or has its first token (decode)."""
    if moment == "decode":
        await anext(stream)
        return
    while not 0 < stream.request.num_computed < len(PROMPT) - 1:
        await asyncio.sleep(0.001)
    assert not stream.request.output


async def ends_by_name(streams: list[RequestStream], sentence: str) -> None:
    for stream in streams:
        with pytest.raises(EngineDown, match=sentence):
            async for _ in stream:
                pass


def drill(ranks: RealRanks, model: str, slug: str, rank: int, moment: str) -> None:
    layout = Layout.parse(slug)

    async def scenario() -> None:
        await ranks.stand(model, settings(layout))
        before = await ranks.tokens(SHORT, 8)
        streams = [ranks.ask(PROMPT, NUM_NEW), ranks.ask(SHORT, NUM_NEW)]
        await reach(streams[0], moment)
        began = time.monotonic()
        os.kill(ranks.pool.pids[rank], signal.SIGKILL)
        await ends_by_name(streams, rf"Rank {rank} .*SIGKILL")
        assert time.monotonic() - began < 5
        await ranks.ready()
        assert ranks.engine.state()["layout"] == layout.slug
        assert await ranks.tokens(SHORT, 8) == before

    ranks.run(scenario(), 100)
