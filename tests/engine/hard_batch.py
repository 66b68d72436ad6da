"""One batch that meets all that may go wrong at once, and what transformers gives for it.

Ragged lengths, prompts cut into chunks, a shared prefix found in the cache, and a KV cache so small that sequences are
preempted and computed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from real_ranks import RealRanks
from step_checks import check_steps
from tiny_models import SMALL, continuation, prompts

from labkit.engine.core import EngineSettings, Output
from labkit.engine.request import Request
from labkit.layout import AnyLayout, Layout, kv_bytes_per_token, pools_of, rank_memory
from labkit.model.spec import load_spec

NUM_NEW, BLOCK_SIZE, NUM_BLOCKS = 16, 8, 9
TOLERANCE = 1e-4
VOCAB = SMALL["vocab_size"]
HEAD = prompts([2 * BLOCK_SIZE], seed=1)[0]
ASKED = prompts([1, 7, 8, 9, 30], seed=2) + [HEAD + tail for tail in prompts([5, 9, 1], seed=3)]


@dataclass
class Answer:
    request: Request
    outputs: list[Output]


def hard_settings(layout: AnyLayout, memory_per_rank: int = 2**26, **others: object) -> EngineSettings:
    """Few tokens a step, so that prompts are cut, and admission that lets in more than fits."""
    return EngineSettings(
        layout=layout, memory_per_rank=memory_per_rank, block_size=BLOCK_SIZE, max_num_batched_tokens=20,
        max_num_seqs=8, admission="vllm", **others,  # type: ignore[arg-type]
    )  # fmt: skip


def kv_bytes(folder: Path, layout: Layout, rank: int) -> int:
    """Room for NUM_BLOCKS blocks, one of them for padding."""
    return NUM_BLOCKS * BLOCK_SIZE * kv_bytes_per_token(layout, load_spec(folder), rank, 4)


async def tight_bytes(ranks: RealRanks, folder: Path, layout: AnyLayout, **others: object) -> int:
    """A budget that leaves the rank which needs most just that room.

    A tied head may be laid out apart from the embedding, as the machine likes it, so then the ranks are asked.
    """
    spec = load_spec(folder)
    if spec.tie_word_embeddings:
        await ranks.stand(str(folder), hard_settings(layout, **others))
        told = {record.rank: record.weights for record in ranks.engine.state()["memory"]}
    else:
        told = {
            pool.first_rank + rank: sum(rank_memory(pool.layout, spec, rank, 4).values())
            for pool in pools_of(layout)
            for rank in range(pool.layout.world_size)
        }
    return max(
        told[pool.first_rank + rank] + kv_bytes(folder, pool.layout, rank)
        for pool in pools_of(layout)
        for rank in range(pool.layout.world_size)
    )


def serve(ranks: RealRanks, folder: Path, layout: AnyLayout, **others: object) -> list[Answer]:
    """The batch under the layout, after one prompt alone that leaves its blocks behind for those that begin alike."""

    async def scenario() -> list[Answer]:
        memory_per_rank = await tight_bytes(ranks, folder, layout, **others)
        await ranks.stand(str(folder), hard_settings(layout, memory_per_rank, **others))
        ranks.events.clear()
        return [await answer(ranks, HEAD), *await answer_all(ranks, ASKED)]

    return ranks.run(scenario())


async def answer(ranks: RealRanks, prompt: Sequence[int], num_new: int = NUM_NEW) -> Answer:
    """With the log-probability of every token of the vocabulary."""
    stream = ranks.ask(prompt, num_new, logprobs=VOCAB)
    return Answer(stream.request, [output async for output in stream])


async def answer_all(ranks: RealRanks, asked: Sequence[Sequence[int]]) -> list[Answer]:
    return await asyncio.gather(*[answer(ranks, prompt) for prompt in asked])


def assert_as_transformers(folder: Path, answers: Sequence[Answer]) -> None:
    """Tokens exactly, log-probabilities within the tolerance."""
    for each in answers:
        ours = [step for output in each.outputs for step in output.logprobs]
        tokens, logprobs = continuation(folder, list(each.request.prompt), each.request.params.max_tokens)
        assert [token for output in each.outputs for token in output.token_ids] == tokens
        for (_, pairs), theirs in zip(ours, logprobs, strict=True):
            assert [token for token, _ in sorted(pairs)] == list(range(VOCAB))
            row = torch.tensor([value for _, value in sorted(pairs)])
            assert (row - theirs).abs().max() < TOLERANCE


def assert_hard(ranks: RealRanks, layout: Layout, answers: Sequence[Answer]) -> None:
    """The batch met what it is there for; over many replicas each has room."""
    assert sum(event["cached_tokens"] for event in ranks.requests()) > 0, "no prefix was found in the cache"
    if layout.dp <= 2:
        assert sum(each.request.num_preemptions for each in answers) > 0, "nothing was preempted"


def assert_parity(ranks: RealRanks, folder: Path, layout: Layout, **others: object) -> None:
    """The batch gives what transformers gives, and the steps tell what they did. others: settings of the engine."""
    answers = serve(ranks, folder, layout, **others)
    assert_as_transformers(folder, answers)
    assert_hard(ranks, layout, answers)
    check_steps(ranks.steps(), load_spec(folder), layout)
