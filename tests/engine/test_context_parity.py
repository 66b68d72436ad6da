"""Positions shared out over ranks as threads: every length that may go wrong, and what crosses, to the byte.

Lengths stand around a block, and around what one rank stores of a block; 4,096 is a context of many blocks, read in
chunks. The reference is transformers, or, where only one thing changes, the same ranks without it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from thread_ranks import ThreadRanks, make_step, serve
from tiny_models import SMALL, assert_same, make_checkpoint, prompts

from labkit.engine.messages import SampleSpec
from labkit.layout import Layout, StepShape, block_tokens, query_loads, step_card, stored_block
from labkit.measure.recorder import AXES, OPS, RING_DTYPE
from labkit.model.spec import load_spec

NUM_NEW, BLOCK = 6, 8
HEADS_OF = {
    "pcp2": 2, "pcp2+ring": 2, "pcp4": 2, "pcp3+ring": 2, "tp2xpcp2": 2, "pcp2xdcp2": 2, "pcp2xdcp2+ring": 2,
    "tp4xdcp2": 2, "tp2xdcp2": 1, "tp4xdcp4": 1, "tp2xpcp2xdcp2+ring": 2, "tp2xpcp2xdcp4": 1,
}  # fmt: skip
"""Layout → KV heads for which it is legal."""


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    folder = tmp_path_factory.mktemp("context")
    return {
        (family, heads): make_checkpoint(
            folder / str(heads), family, num_key_value_heads=heads, max_position_embeddings=4200
        )
        for family in ("llama-untied-biases", "mistral-window")
        for heads in (1, 2)
    }


def critical_lengths(layout: str) -> list[int]:
    dcp = Layout.parse(layout).dcp
    edges = {BLOCK // dcp, BLOCK, dcp * BLOCK, 2 * dcp * BLOCK}
    return sorted({1, 2} | {edge + off for edge in edges for off in (-1, 0, 1)} - {0})


@pytest.mark.parametrize("family", ["llama-untied-biases", "mistral-window"])
@pytest.mark.parametrize("layout", HEADS_OF)
def test_lengths_around_every_boundary(folders: dict[tuple[str, int], Path], layout: str, family: str) -> None:
    folder = folders[family, HEADS_OF[layout]]
    ranks = ThreadRanks(folder, layout, block_size=BLOCK)
    for budget in (512, 5):
        asked = prompts(critical_lengths(layout))
        assert_same(folder, serve(ranks, asked, NUM_NEW, budget=budget + len(asked), logprobs=SMALL["vocab_size"]))


@pytest.mark.parametrize("layout", HEADS_OF)
def test_each_critical_length_alone(folders: dict[tuple[str, int], Path], layout: str) -> None:
    """A prompt alone leaves ranks without a row, and shares without a key."""
    folder = folders["llama-untied-biases", HEADS_OF[layout]]
    ranks = ThreadRanks(folder, layout, block_size=BLOCK)
    for prompt in prompts([1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1]):
        assert_same(folder, serve(ranks, [prompt], 3, budget=4, logprobs=SMALL["vocab_size"]))


@pytest.mark.parametrize("layout", ["pcp2", "pcp2+ring", "pcp4", "tp4xdcp2", "tp4xdcp4", "pcp2xdcp2", "tp2xpcp2xdcp4"])
def test_a_context_of_4096(folders: dict[tuple[str, int], Path], layout: str) -> None:
    folder = folders["llama-untied-biases", HEADS_OF[layout]]
    ranks = ThreadRanks(folder, layout, block_size=16, memory_bytes=16 << 20)
    seqs = serve(ranks, prompts([4096, 37]), NUM_NEW, budget=500, logprobs=SMALL["vocab_size"])
    assert_same(folder, seqs)


@pytest.mark.parametrize("layout", ["pcp2", "pcp2+ring", "tp4xdcp2", "pcp2xdcp2+ring", "tp2xpcp2xdcp4"])
def test_a_prefix_is_taken_over_whatever_the_prompts_length(
    folders: dict[tuple[str, int], Path], layout: str
) -> None:
    folder = folders["llama-untied-biases", HEADS_OF[layout]]
    head = prompts([3 * BLOCK], seed=1)[0]
    asked = [head + tail for tail in prompts([5, 1, 9, BLOCK, BLOCK - 1, 2 * BLOCK + 1], seed=2)]
    ranks = ThreadRanks(folder, layout, block_size=BLOCK)
    for shared in (1, 2, 3):
        seqs = serve(ranks, asked, NUM_NEW, shared=shared, logprobs=SMALL["vocab_size"])
        assert all(seq.blocks[:shared] == seqs[0].blocks[:shared] for seq in seqs)
        assert_same(folder, seqs)


def test_a_block_that_dcp_does_not_divide_is_rounded_up(folders: dict[tuple[str, int], Path]) -> None:
    layout, folder = Layout.parse("pcp3xdcp3"), folders["llama-untied-biases", 2]
    assert (stored_block(layout, 16), block_tokens(layout, 16)) == (6, 18)
    ranks = ThreadRanks(folder, "pcp3xdcp3", block_size=16)
    ranks.block_size = block_tokens(layout, 16)
    assert_same(folder, serve(ranks, prompts([17, 18, 19, 50]), NUM_NEW, logprobs=SMALL["vocab_size"]))


# ---- what crosses


def crossings(ranks: ThreadRanks, rank: int) -> Counter[tuple[str, str, int]]:
    """(axis, operation, bytes) → how often, since the last look; a wait for a send is no second one."""
    door = ranks.runners[rank]._configured().decoder.door
    rows = np.frombuffer(door.drain(), RING_DTYPE)
    return Counter((AXES[row["axis"]], OPS[row["op"]], int(row["bytes"])) for row in rows if row["bytes"])


def expected(ranks: ThreadRanks, folder: Path, axis: str, step: StepShape) -> Counter[tuple[str, str, int]]:
    cards = {card.axis: card for card in step_card(ranks.layout, load_spec(folder), step, 4)}
    names = {"isend": "send"}
    ops: Counter[tuple[str, str, int]] = Counter()
    for op in cards[axis].ops:
        ops[axis, names.get(op.operation, op.operation), op.bytes_each] += op.count
    return ops


@pytest.mark.parametrize("layout", ["pcp2", "pcp2+ring", "pcp4", "pcp3+ring", "tp2xpcp2"])
def test_a_prefill_sends_what_the_card_says(folders: dict[tuple[str, int], Path], layout: str) -> None:
    folder = folders["llama-untied-biases", 2]
    ranks = ThreadRanks(folder, layout, block_size=BLOCK)
    for rank in range(ranks.layout.world_size):
        crossings(ranks, rank)
    ranks.step(make_step([(prompts([48])[0], 0, list(range(6)))], [SampleSpec(0)], 1))
    for rank in range(ranks.layout.world_size):
        found = crossings(ranks, rank)
        mine = Counter({key: n for key, n in found.items() if key[0] == "pcp" and key[1] != "recv"})
        assert mine == expected(ranks, folder, "pcp", StepShape(prefill_tokens=48))
        if ranks.layout.ring:
            assert sum(n for key, n in found.items() if key[1] == "recv") == sum(mine.values())


@pytest.mark.parametrize("layout", ["tp2xdcp2", "tp4xdcp2", "tp4xdcp4", "pcp2xdcp2"])
def test_a_decode_sends_what_the_card_says(folders: dict[tuple[str, int], Path], layout: str) -> None:
    folder = folders["llama-untied-biases", HEADS_OF[layout]]
    ranks = ThreadRanks(folder, layout, block_size=BLOCK)
    for rank in range(ranks.layout.world_size):
        crossings(ranks, rank)
    ranks.step(make_step([([5], 20, [0, 1, 2]), ([6], 9, [3, 4]), ([7], 0, [5])], [SampleSpec(i) for i in range(3)], 0))
    for rank in range(ranks.layout.world_size):
        mine = Counter({key: n for key, n in crossings(ranks, rank).items() if key[0] == "dcp"})
        assert mine == expected(ranks, folder, "dcp", StepShape(decode_seqs=3, context_tokens=20))


# ---- balance


@pytest.mark.parametrize("pcp", [2, 3, 4, 8])
@pytest.mark.parametrize(("context", "num_tokens"), [(0, 512), (0, 509), (4096, 512), (0, 3), (100, 1)])
def test_zigzag_balances_what_a_contiguous_share_does_not(pcp: int, context: int, num_tokens: int) -> None:
    loads = query_loads(Layout(pcp=pcp), context, num_tokens)
    everything = sum(context + p + 1 for p in range(num_tokens))
    assert sum(loads) == everything
    if num_tokens > 500:
        assert max(loads) <= 1.02 * everything / pcp
        last = sum(context + p + 1 for p in range(num_tokens - num_tokens // pcp, num_tokens))
        assert context or last > 1.4 * everything / pcp, "the last contiguous share"
