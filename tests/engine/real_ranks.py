"""An engine on real ranks under torchrun, with an event loop of its own, so that a plain test can drive it.

One pool serves a whole file: an engine for each model is made on it in turn, and each test gives it the layout that it
wants. What the engine tells is kept in `events`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from labkit.cluster.nodes import Nodes
from labkit.cluster.pool import Pool, PoolConfig
from labkit.engine.core import Engine, EngineSettings, RequestStream
from labkit.engine.request import Request, SamplingParams
from labkit.engine.watchdog import STEP_TIMEOUT_S
from labkit.measure.records import StepRecord
from labkit.model.spec import load_spec


class RealRanks:
    """nodes: the ranks stand on emulated nodes instead of one. step_timeout_s: of the engine. device: cpu or cuda."""

    def __init__(
        self, run_dir: Path, num_ranks: int = 4, nodes: Nodes | None = None, step_timeout_s: float = STEP_TIMEOUT_S,
        device: str = "cpu",
    ) -> None:  # fmt: skip
        self._runner = asyncio.Runner()
        self._engine: Engine | None = None
        self._num_asked, self._step_timeout_s = 0, step_timeout_s
        self.events: list[dict[str, Any]] = []
        num_ranks = nodes.num_ranks if nodes else num_ranks
        backend = "nccl" if device == "cuda" else "gloo"
        config = PoolConfig(num_ranks, threads=1, device=device, backend=backend, run_dir=run_dir, nodes=nodes)
        self.pool = Pool(
            config,
            lambda rank, message: self.engine.on_message(rank, message),
            lambda failure: self.engine.on_failure(failure),
            lambda state: self.engine.on_pool_state(state),
        )

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "give the ranks a model first: stand(model, settings)"
        return self._engine

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float = 90.0) -> Any:
        return self._runner.run(asyncio.wait_for(work, timeout_s))

    def close(self) -> None:
        if self._engine is not None:
            self.run(self._engine.stop())
        self._runner.close()

    # ---- what is asked of it (coroutines: the caller's scenario runs them)

    async def stand(self, model: str, settings: EngineSettings) -> None:
        """The model (a name or a folder) under these settings, on warm ranks where there are any."""
        if self._engine is None or self._engine.model != model:
            self._engine = Engine(
                self.pool, model, load_spec(model), self.events.append,
                step_timeout_s=self._step_timeout_s, check=True,
            )  # fmt: skip
            await self._engine.start(settings)
        else:
            await self.ready()
            await self._engine.switch(settings)

    async def ready(self) -> None:
        """Once the engine is: ranks that broke come back by themselves."""
        async with asyncio.timeout(60):
            while self.engine.state()["state"] != "ready":
                await asyncio.sleep(0.02)

    def ask(self, prompt: Sequence[int], max_tokens: int, **params: Any) -> RequestStream:
        """Greedy, to the last of `max_tokens`, unless `params` say otherwise."""
        self._num_asked += 1
        wanted = SamplingParams(max_tokens, **{"temperature": 0.0, "ignore_eos": True, **params})
        return self.engine.submit(Request(f"r{self._num_asked}", tuple(prompt), wanted, time.monotonic_ns()))

    async def tokens(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        return [token async for output in self.ask(prompt, max_tokens) for token in output.token_ids]

    # ---- what it told

    def requests(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == "request"]

    def steps(self) -> list[StepRecord]:
        """Every step since the events were last cleared."""
        self.run(self.engine.settle())
        return [step for event in self.events if event["event"] == "steps" for step in event["steps"]]


@contextmanager
def real_ranks(
    run_dir: Path, num_ranks: int = 4, nodes: Nodes | None = None, device: str = "cpu"
) -> Iterator[RealRanks]:
    made = RealRanks(run_dir, num_ranks, nodes, device=device)
    try:
        yield made
    finally:
        made.close()
