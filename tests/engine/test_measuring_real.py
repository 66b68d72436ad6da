"""What joins the engine's own ranks, measured on them between two requests: right figures, and an engine as before."""

from __future__ import annotations

import pytest
from real_ranks import RealRanks

from labkit.engine.core import EngineSettings
from labkit.engine.measuring import Measuring
from labkit.layout import Layout
from labkit.measure.link_bench import CurveGroup, LinkBench

pytestmark = [pytest.mark.engine, pytest.mark.slow]
PROMPT = [7 + i % 200 for i in range(40)]


def test_pairs_and_curves_on_the_warm_ranks_leave_the_engine_as_it_was(four: RealRanks) -> None:
    """TP2 stands on two of four ranks: the idle ones are measured too, and over both fabrics."""

    async def scenario() -> None:
        await four.stand("lab-5m", EngineSettings(layout=Layout(tp=2), memory_per_rank=64 << 20))
        before = await four.tokens(PROMPT, 12)
        four.events.clear()
        async with four.engine.measuring() as ranks:
            bench = LinkBench(ranks.ask, epoch=ranks.epoch, serial=Measuring.serial)
            near = await bench.pair(1, 3, "shm", False)
            far = await bench.pair(0, 2, "gloo", False)
            rows = [
                row
                for group in (CurveGroup("world", (0, 1, 2, 3), "shm"), CurveGroup("tp", (0, 1), "gloo"))
                for op in ("all_reduce", "all_to_all", "sendrecv")
                for row in await bench.curve(group, op, (64, 5000))
            ]
            await bench.end()
        assert [each["wrong"] for each in (near, far, *rows)] == [0] * (2 + len(rows)) and len(rows) == 12
        assert all(0 < each["latency_us"] <= each["time_us"] for each in (near, far))
        assert await four.tokens(PROMPT, 12) == before
        assert not any(event["event"] in ("failure", "switch") for event in four.events)

    four.run(scenario())
    (step, *_) = four.steps()
    assert step.num_collectives > 0 and step.ranks == [0, 1], "the measurement's own calls are no step's"
