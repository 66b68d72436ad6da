"""Every family under every split gives the tokens and the logits that transformers gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from thread_ranks import ThreadRanks, serve
from tiny_models import FAMILIES, SMALL, assert_same, continuation, make_checkpoint, prompts

NUM_NEW = 8
LENGTHS = [1, 7, 8, 9, 40, 25]
"""One token, a block less one, a block, one more, several blocks."""


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {family: make_checkpoint(folder, family) for family in FAMILIES}


@pytest.mark.parametrize("layout", ["tp1", "tp2", "tp4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_batch_gives_the_tokens_and_logits_of_transformers(
    checkpoints: dict[str, Path], family: str, layout: str
) -> None:
    ranks = ThreadRanks(checkpoints[family], layout)
    seqs = serve(ranks, prompts(LENGTHS), NUM_NEW, logprobs=SMALL["vocab_size"])
    assert_same(checkpoints[family], seqs)


def test_more_ranks_than_kv_heads_with_norms_of_each_head(checkpoints: dict[str, Path]) -> None:
    """8 ranks, 4 KV heads: each head and its K-norm is on two ranks, whole."""
    folder = checkpoints["qwen3-qk-norm-own-head-dim"]
    seqs = serve(ThreadRanks(folder, "tp8"), prompts([9, 4]), NUM_NEW, logprobs=SMALL["vocab_size"])
    assert_same(folder, seqs)


@pytest.mark.parametrize("layout", ["tp1", "tp2"])
def test_chunks_of_prompts_share_steps_with_decodes(checkpoints: dict[str, Path], layout: str) -> None:
    for family in ("llama-tied-llama3-rope", "mistral-window"):
        ranks = ThreadRanks(checkpoints[family], layout)
        seqs = serve(ranks, prompts([30, 3, 21]), NUM_NEW, budget=7, logprobs=SMALL["vocab_size"])
        assert_same(checkpoints[family], seqs)


def test_lengths_that_differ_much_are_attended_in_groups(checkpoints: dict[str, Path]) -> None:
    folder = checkpoints["llama-tied-llama3-rope"]
    seqs = serve(ThreadRanks(folder), prompts([3, 200, 5, 180, 4, 6]), NUM_NEW, logprobs=SMALL["vocab_size"])
    assert_same(folder, seqs)


def test_a_prompt_that_takes_over_shared_blocks_computes_only_the_rest(checkpoints: dict[str, Path]) -> None:
    folder = checkpoints["qwen2-qkv-bias"]
    head = prompts([16], seed=1)[0]
    asked = [head + tail for tail in prompts([5, 1, 9], seed=2)]
    seqs = serve(ThreadRanks(folder), asked, NUM_NEW, shared=2, logprobs=SMALL["vocab_size"])
    assert seqs[1].blocks[:2] == seqs[0].blocks[:2]
    assert_same(folder, seqs)


def test_a_sequence_computed_again_in_other_blocks_goes_on_as_before(checkpoints: dict[str, Path]) -> None:
    folder, prompt = checkpoints["llama-untied-biases"], prompts([11])[0]
    ranks = ThreadRanks(folder)
    before = serve(ranks, [prompt], 4)[0]
    after = serve(ranks, [prompts([20], seed=5)[0], prompt + before.tokens], NUM_NEW - 4)[1]
    assert before.tokens + after.tokens == continuation(folder, prompt, NUM_NEW)[0]


def test_every_replica_and_its_ranks_hold_the_whole_model_together(checkpoints: dict[str, Path]) -> None:
    folder = checkpoints["qwen3-qk-norm-own-head-dim"]
    ranks = ThreadRanks(folder, "dp2xtp2")
    for replica in (0, 1):
        seqs = serve(ranks, prompts([12, 3]), NUM_NEW, replica=replica, logprobs=SMALL["vocab_size"])
        assert_same(folder, seqs)


@pytest.mark.parametrize("layout", ["tp1", "tp2"])
def test_padded_decode_steps_give_what_plain_ones_give(checkpoints: dict[str, Path], layout: str) -> None:
    folder = checkpoints["mistral-window"]
    ranks = ThreadRanks(folder, layout, graphs=True)
    asked = prompts([1, 17, 26, 8, 33])
    seqs = serve(ranks, asked, NUM_NEW, logprobs=SMALL["vocab_size"])
    assert_same(folder, seqs)
    graphs = ranks.runners[0]._model.graphs  # type: ignore[union-attr]
    assert graphs is not None and {count for count, _ in graphs._buckets} == {8}


def test_bf16_stays_within_a_tolerance_of_float32(checkpoints: dict[str, Path]) -> None:
    folder, prompt = checkpoints["qwen2-qkv-bias"], prompts([9])[0]
    vocab = SMALL["vocab_size"]
    exact = serve(ThreadRanks(folder), [prompt], 1, logprobs=vocab)[0].logprobs[0]
    for layout in ("tp1", "tp2"):
        rough = serve(ThreadRanks(folder, layout, dtype="bfloat16"), [prompt], 1, logprobs=vocab)[0]
        gaps = [abs(rough.logprobs[0][token] - exact[token]) for token in range(vocab)]
        assert 1e-5 < max(gaps) < 0.35


def test_logits_of_padding_are_neither_sampled_nor_returned(checkpoints: dict[str, Path]) -> None:
    """151 entries over 4 ranks are padded to 152; the padded row scores 0, more than most real ones here."""
    ranks = ThreadRanks(checkpoints["llama-untied-biases"], "tp4")
    drawn = serve(ranks, prompts([4] * 8), 12, logprobs=400, params={"temperature": 50.0, "seed": 3})
    assert {token for seq in drawn for token in seq.tokens} <= set(range(151))
    assert all(set(row) == set(range(151)) for seq in drawn for row in seq.logprobs)
