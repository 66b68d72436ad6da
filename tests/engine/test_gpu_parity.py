"""On a GPU: float32 agrees with transformers, and bf16 decode steps replayed as graphs agree with plain ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from thread_ranks import ThreadRanks, serve
from tiny_models import MOE_FAMILIES, SMALL, continuation, make_checkpoint, prompts

pytestmark = pytest.mark.gpu
VOCAB = SMALL["vocab_size"]


@pytest.mark.parametrize("graphs", [False, True])
def test_float32_gives_the_tokens_of_transformers(tmp_path: Path, graphs: bool) -> None:
    folder = make_checkpoint(tmp_path, "qwen3-qk-norm-own-head-dim")
    torch.backends.cuda.matmul.allow_tf32 = False
    ranks = ThreadRanks(folder, graphs=graphs, device="cuda")
    for seq in serve(ranks, prompts([1, 17, 40]), 8, budget=20):
        assert seq.tokens == continuation(folder, seq.prompt, 8)[0]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_mixtures_of_experts_give_the_tokens_of_transformers(tmp_path: Path, family: str, graphs: bool) -> None:
    folder = make_checkpoint(tmp_path, family)
    torch.backends.cuda.matmul.allow_tf32 = False
    ranks = ThreadRanks(folder, graphs=graphs, device="cuda")
    for seq in serve(ranks, prompts([1, 17, 40]), 8, budget=20):
        assert seq.tokens == continuation(folder, seq.prompt, 8)[0]


def test_graphs_replay_what_a_plain_step_computes_in_bf16(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "mistral-window")
    found = []
    for graphs in (False, True):
        ranks = ThreadRanks(folder, graphs=graphs, dtype="bfloat16", device="cuda")
        found.append(serve(ranks, prompts([9, 30, 2]), 6, logprobs=VOCAB))
        ranks.runners[0].release()
    for plain, replayed in zip(*found, strict=True):
        gaps = [abs(plain.logprobs[0][token] - replayed.logprobs[0][token]) for token in range(VOCAB)]
        assert max(gaps) < 0.1


def test_instants_of_a_gpu_step_cover_the_device_time(tmp_path: Path) -> None:
    ranks = ThreadRanks(make_checkpoint(tmp_path, "mistral"), device="cuda")
    assert ranks.ready[0].memory.kv > 0
    seq = serve(ranks, prompts([40]), 2)[0]
    assert len(seq.tokens) == 2
