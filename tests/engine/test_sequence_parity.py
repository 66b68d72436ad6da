"""Rows shared out between layers (`+sp`) give what transformers gives, and cross as the card says, to the byte.

Rows that tp does not divide are the rule here: ragged batches, chunks, a single decode over four ranks. Beside
stages, shared positions and experts, in padded decode steps, and with blocks that are computed again.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from test_context_parity import crossings, expected
from test_parity import LENGTHS, NUM_NEW, assert_same
from thread_ranks import ThreadRanks, make_step, on_threads, serve, thread_groups
from tiny_models import SMALL, continuation, make_checkpoint, prompts

from labkit.engine.messages import SampleSpec
from labkit.layout import StepShape
from labkit.parallel.sequence import ResidualStream

VOCAB = SMALL["vocab_size"]
DENSE = ["tp2+sp", "tp4+sp", "pp2xtp2+sp"]
COMBINED = ["tp2xpcp2+sp", "tp2xpcp2+sp+ring", "tp2xpcp2xdcp2+sp", "pp2xpcp2xtp2+sp", "dp2xtp2+sp"]
EXPERTS = ["tp2+sp", "tp4xep4+sp", "pp2xtp2xep2+sp", "pcp2xtp2xep4+sp"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    families = ("llama-untied-biases", "llama-tied-llama3-rope", "mistral-window", "qwen2-moe-shared")
    heads = {"llama-untied-biases": {"num_key_value_heads": 2}}
    return {family: make_checkpoint(folder, family, **heads.get(family, {})) for family in families}


# ---- the same text


@pytest.mark.parametrize("family", ["llama-untied-biases", "llama-tied-llama3-rope", "mistral-window"])
@pytest.mark.parametrize("layout", DENSE)
def test_ragged_batches_and_chunks_give_what_transformers_gives(
    folders: dict[str, Path], layout: str, family: str
) -> None:
    ranks = ThreadRanks(folders[family], layout)
    assert_same(folders[family], serve(ranks, prompts(LENGTHS), NUM_NEW, logprobs=VOCAB))
    assert_same(folders[family], serve(ranks, prompts([30, 3, 21]), NUM_NEW, budget=7, logprobs=VOCAB))


@pytest.mark.parametrize("layout", COMBINED)
def test_it_goes_together_with_every_other_axis(folders: dict[str, Path], layout: str) -> None:
    folder = folders["llama-untied-biases"]
    ranks = ThreadRanks(folder, layout)
    for replica in range(ranks.layout.dp):
        for budget in (512, 7):
            seqs = serve(ranks, prompts(LENGTHS), NUM_NEW, budget=budget, replica=replica, logprobs=VOCAB)
            assert_same(folder, seqs)


@pytest.mark.parametrize("layout", [*EXPERTS, "dp2xtp2xep4+sp"])
def test_experts_take_the_rows_that_a_rank_holds(folders: dict[str, Path], layout: str) -> None:
    folder = folders["qwen2-moe-shared"]
    assert_same(folder, serve(ThreadRanks(folder, layout), prompts(LENGTHS), NUM_NEW, logprobs=VOCAB))


@pytest.mark.parametrize("layout", ["tp4+sp", "pp2xtp2+sp"])
def test_padded_decode_steps_give_what_plain_ones_give(folders: dict[str, Path], layout: str) -> None:
    """Of 1, 2 and 5 decodes in a bucket of their own size each: shares that are full, padded, and padding alone."""
    folder = folders["mistral-window"]
    ranks = ThreadRanks(folder, layout, graphs=True)
    for asked in (prompts([9]), prompts([1, 17]), prompts([1, 17, 26, 8, 33])):
        assert_same(folder, serve(ranks, asked, NUM_NEW, logprobs=VOCAB))
    graphs = ranks.runners[0]._configured().graphs
    assert graphs is not None and {count for count, _ in graphs._buckets} == {1, 2, 8}


def test_a_sequence_computed_again_in_other_blocks_goes_on_as_before(folders: dict[str, Path]) -> None:
    folder, prompt = folders["llama-untied-biases"], prompts([11])[0]
    ranks = ThreadRanks(folder, "tp4+sp")
    before = serve(ranks, [prompt], 4)[0]
    after = serve(ranks, [prompts([20], seed=5)[0], prompt + before.tokens], NUM_NEW - 4)[1]
    assert before.tokens + after.tokens == continuation(folder, prompt, NUM_NEW)[0]


def test_a_chunk_that_ends_no_prompt_yields_no_token(folders: dict[str, Path]) -> None:
    ranks = ThreadRanks(folders["mistral-window"], "tp2+sp")
    assert ranks.step(make_step([([5, 6, 7], 0, [0])], [], 1)).token_ids == []


# ---- what a rank holds


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 5, 9])
@pytest.mark.parametrize("shares", [False, True])
def test_shares_cover_all_rows_once_and_come_back_in_order(num_rows: int, shares: bool) -> None:
    terms = torch.randn(4, num_rows, 6, generator=torch.Generator().manual_seed(0))

    def member(rank: int) -> tuple[torch.Tensor, ...]:
        stream = ResidualStream(groups[rank], shares)
        stream.begin(num_rows)
        held = stream.summed(terms[rank].clone())
        assert len(held) == stream.held(num_rows) == (-(-num_rows // 4) if shares else num_rows)
        return stream.whole(held), stream.share(held), stream.whole(stream.rejoined(stream.share(held)))

    groups = thread_groups(4)
    found = on_threads([lambda rank=rank: member(rank) for rank in range(4)])
    for whole, _, rejoined in found:
        assert torch.allclose(whole, terms.sum(0), atol=1e-6) and torch.equal(rejoined, whole)
    assert torch.equal(torch.cat([share for _, share, _ in found]), found[0][0])


# ---- what crosses


@pytest.mark.parametrize(
    ("layout", "num_tokens"),
    [("tp2xpcp2+sp", 48), *((layout, n) for layout in DENSE for n in (48, 47, 1))],
)
def test_a_prefill_sends_what_the_card_says(folders: dict[str, Path], layout: str, num_tokens: int) -> None:
    folder = folders["llama-untied-biases"]
    ranks = ThreadRanks(folder, layout)
    blocks = list(range(-(-num_tokens // ranks.block_size)))
    step = make_step([(prompts([num_tokens])[0], 0, blocks)], [SampleSpec(0)], 1)
    assert_crosses(ranks, folder, step, StepShape(prefill_tokens=num_tokens))


@pytest.mark.parametrize(
    ("family", "layout"),
    [("llama-untied-biases", "tp2+sp"), ("llama-untied-biases", "tp4+sp"), ("qwen2-moe-shared", "tp4+sp"),
     ("qwen2-moe-shared", "tp2xep2+sp"), ("qwen2-moe-shared", "tp4xep4+sp")],
)  # fmt: skip
def test_a_decode_sends_what_the_card_says(folders: dict[str, Path], family: str, layout: str) -> None:
    ranks = ThreadRanks(folders[family], layout)
    step = make_step([([5], 20, [0, 1, 2]), ([6], 9, [3, 4]), ([7], 0, [5])], [SampleSpec(i) for i in range(3)], 0)
    assert_crosses(ranks, folders[family], step, StepShape(decode_seqs=3, context_tokens=20))


def assert_crosses(ranks: ThreadRanks, folder: Path, step: object, shape: StepShape) -> None:
    """All stages of a path together: what the card counts."""
    layout = ranks.layout
    for rank in range(layout.world_size):
        crossings(ranks, rank)
    ranks.step(step)  # type: ignore[arg-type]
    found = [crossings(ranks, rank) for rank in range(layout.world_size)]
    axes = [axis for axis in ("tp", "pp") if getattr(layout, axis) > 1]
    for place in range(layout.ranks_per_stage):
        if layout.coords(place).pcp:
            continue  # the first pcp rank samples
        path = sum((found[stage * layout.ranks_per_stage + place] for stage in range(layout.pp)), Counter())
        mine = Counter({key: n for key, n in path.items() if key[0] in axes and key[1] != "recv"})
        assert mine == sum((expected(ranks, folder, axis, shape) for axis in axes), Counter())
