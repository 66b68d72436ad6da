"""Every family on four real ranks under torchrun gives what transformers gives: tokens exactly, logits within 1e-4.

One batch meets all that may go wrong at once: ragged lengths, prompts cut into chunks, a shared prefix found in the
cache, and a KV cache so small that sequences are preempted and computed again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, SMALL, continuation, make_checkpoint, prompts

from labkit.cluster.nodes import Nodes
from labkit.cluster.pool import Pool, PoolConfig
from labkit.engine.core import Engine, EngineSettings, Output
from labkit.engine.request import Request, SamplingParams
from labkit.layout import Layout, kv_bytes_per_token
from labkit.model.spec import ModelSpec, load_spec

pytestmark = pytest.mark.engine
NUM_NEW, BLOCK_SIZE, NUM_BLOCKS = 16, 8, 9
LAYOUTS = ["tp1", "tp2", "tp4", "dp2", "dp2xtp2"]
HEAD = prompts([2 * BLOCK_SIZE], seed=1)[0]
ASKED = prompts([1, 7, 8, 9, 30], seed=2) + [HEAD + tail for tail in prompts([5, 9, 1], seed=3)]


class FourRanks:
    """One pool for the whole file; each family gets an engine of its own on it."""

    def __init__(self, run_dir: Path, nodes: Nodes | None = None) -> None:
        self.runner = asyncio.Runner()
        self.engine: Engine | None = None
        self.events: list[dict[str, Any]] = []
        num_ranks = nodes.num_ranks if nodes else 4
        config = PoolConfig(num_ranks, threads=1, device="cpu", backend="gloo", run_dir=run_dir, nodes=nodes)
        self.pool = Pool(
            config,
            lambda rank, message: self.engine.on_message(rank, message),
            lambda failure: self.engine.on_failure(failure),
            lambda state: self.engine.on_pool_state(state),
        )

    def serve(self, folder: Path, layout: Layout) -> list[tuple[Request, list[Output]]]:
        return self.runner.run(asyncio.wait_for(self._serve(folder, layout), 90))

    async def _serve(self, folder: Path, layout: Layout) -> list[tuple[Request, list[Output]]]:
        """First with room, to see what the weights take; then with room for NUM_BLOCKS blocks beside them."""
        roomy = EngineSettings(
            layout=layout, memory_per_rank=2**26, block_size=BLOCK_SIZE, max_num_batched_tokens=20, max_num_seqs=8,
            admission="vllm",
        )  # fmt: skip
        spec = load_spec(folder)
        if self.engine is None or self.engine.model != str(folder):
            self.engine = Engine(self.pool, str(folder), spec, self.events.append, check=True)
            await self.engine.start(roomy)
        else:
            await self.engine.switch(roomy)
        await self.engine.switch(replace(roomy, memory_per_rank=self._tight_bytes(layout, spec)))
        self.events.clear()
        first = await self._answer(len(ASKED), HEAD)  # leaves its blocks behind for those that begin alike
        rest = await asyncio.gather(*[self._answer(index, prompt) for index, prompt in enumerate(ASKED)])
        return [first, *rest]

    def _tight_bytes(self, layout: Layout, spec: ModelSpec) -> int:
        """The rank that needs most has room for just so many blocks, and a replica's pool is its poorest rank's."""
        assert self.engine is not None
        num_tokens = NUM_BLOCKS * BLOCK_SIZE
        return max(
            record.weights + num_tokens * kv_bytes_per_token(layout, spec, record.rank, 4)
            for record in self.engine.state()["memory"][: layout.world_size]
        )

    async def _answer(self, index: int, prompt: list[int]) -> tuple[Request, list[Output]]:
        params = SamplingParams(NUM_NEW, temperature=0.0, ignore_eos=True, logprobs=SMALL["vocab_size"])
        request = Request(f"r{index}-{time.monotonic_ns()}", tuple(prompt), params, time.monotonic_ns())
        assert self.engine is not None
        return request, [output async for output in self.engine.submit(request)]

    def close(self) -> None:
        if self.engine is not None:
            self.runner.run(self.engine.stop())
        self.runner.close()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FourRanks]:
    made = FourRanks(tmp_path_factory.mktemp("pool"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {family: make_checkpoint(folder, family) for family in FAMILIES}


def assert_as_transformers(folder: Path, request: Request, outputs: list[Output]) -> None:
    tokens, logprobs = continuation(folder, list(request.prompt), NUM_NEW)
    assert [token for output in outputs for token in output.token_ids] == tokens
    ours = [step for output in outputs for step in output.logprobs]
    for (_, pairs), theirs in zip(ours, logprobs, strict=True):
        row = torch.tensor([value for _, value in sorted(pairs)])
        assert [token for token, _ in sorted(pairs)] == list(range(SMALL["vocab_size"]))
        assert (row - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("slug", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_layout_gives_what_transformers_gives(
    ranks: FourRanks, folders: dict[str, Path], family: str, slug: str
) -> None:
    folder, layout = folders[family], Layout.parse(slug)
    answered = ranks.serve(folder, layout)
    for request, outputs in answered:
        assert_as_transformers(folder, request, outputs)
    told = [event for event in ranks.events if event["event"] == "request"]
    assert sum(event["cached_tokens"] for event in told) > 0, "no prefix was found in the cache"
    if layout.dp == 1:
        assert sum(request.num_preemptions for request, _ in answered) > 0, "nothing was preempted"
