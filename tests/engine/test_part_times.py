"""Parts measured on a rank, and the split made of them, against every split measured as stages really run."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
import torch

from labkit.engine.batches import Shape, build
from labkit.engine.part_times import BLOCK_SIZE, StepKind, measure_parts
from labkit.engine.sampler import sample
from labkit.layout import Layout, balance_stages, weight_slices
from labkit.model.checkpoint import Weights, open_source
from labkit.model.decoder import Decoder
from labkit.model.kv_cache import KVCache
from labkit.model.rope import rotation_table
from labkit.model.spec import load_spec, model_dir
from labkit.parallel.mesh import single_rank_mesh

KIND = StepKind(num_seqs=8, context=48)
NUM_ROUNDS = 25


@pytest.fixture(scope="module")
def heavy_head(tmp_path_factory: pytest.TempPathFactory) -> str:
    """10 layers, and a vocabulary so large that the head takes as long as about five of them."""
    path = tmp_path_factory.mktemp("models") / "heavy-head" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 384, "num_hidden_layers": 10,
        "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1152, "vocab_size": 40_000,
        "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
        "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
    }))  # fmt: skip
    return str(path.parent)


@pytest.fixture(autouse=True)
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class StageRun:
    """One stage of a split as its rank holds it, run on hidden states of the right shape."""

    def __init__(self, model: str, split: tuple[int, ...], stage: int) -> None:
        spec, cpu, layout = load_spec(model), torch.device("cpu"), Layout(pp=len(split), split=split)
        weights = Weights(
            open_source(model_dir(model), spec, 0), weight_slices(layout, spec, stage), torch.float32, cpu
        )
        self.decoder = Decoder(spec, layout, stage, weights, single_rank_mesh(recording=False).tp)
        self.message = KIND.message()
        self.batch = build(self.message, Shape(BLOCK_SIZE, KIND.num_blocks, (None,), torch.float32, cpu))
        self.cache = KVCache(
            split[stage], KIND.num_blocks, spec.num_kv_heads, spec.head_dim, BLOCK_SIZE, torch.float32, cpu
        )
        self.turns = rotation_table(spec.rope, spec.head_dim, KIND.table_len * BLOCK_SIZE, cpu)
        self.hidden = torch.randn(KIND.num_seqs, spec.hidden_size) if stage else None

    @torch.inference_mode()
    def seconds(self) -> float:
        began = time.perf_counter()
        out = self.decoder.forward(self.batch, self.cache, self.turns, self.hidden)
        assert out is not None
        if self.decoder.head is not None:
            sample(out, self.message.sample)
        return time.perf_counter() - began


def slowest_stages(model: str) -> dict[tuple[int, int], float]:
    """For every split of 10 layers in two, the measured seconds of its slower stage: medians of rounds that go
    through all splits, so that a busy moment of the machine meets them alike.
    """
    splits = [(first, 10 - first) for first in range(1, 10)]
    runs = {split: [StageRun(model, split, stage) for stage in (0, 1)] for split in splits}
    rounds = [[[run.seconds() for run in runs[split]] for split in splits] for _ in range(NUM_ROUNDS)]
    medians = np.median(np.array(rounds[3:]), axis=0)
    return dict(zip(splits, medians.max(axis=1).tolist(), strict=True))


@pytest.mark.slow
def test_ten_layers_with_a_heavy_head_are_balanced_within_a_tenth_of_the_best_split(heavy_head: str) -> None:
    profile = measure_parts(heavy_head, KIND)
    layer_s = float(np.median([layer.seconds for layer in profile.layers]))
    assert profile.head.seconds > 2 * layer_s, "the head is heavy"
    balance, measured = balance_stages(profile, 2), slowest_stages(heavy_head)
    print({split: f"{1e3 * seconds:.2f} ms" for split, seconds in measured.items()}, balance.split, balance.gain)
    best_s = min(measured.values())
    assert measured[balance.split] <= 1.1 * best_s
    assert measured[(5, 5)] > 1.1 * best_s, "an equal split is not, or nothing was shown"


def test_a_profile_counts_each_part_once_and_says_what_it_measured(heavy_head: str) -> None:
    spec = load_spec(heavy_head)
    profile = measure_parts(heavy_head, StepKind(prefill_tokens=20), num_passes=3, kv_tokens=100)
    weights = 4 * spec.num_parameters + 100 * spec.kv_bytes_per_token(4)
    total = sum(part.num_bytes for part in (profile.embedding, *profile.layers, profile.head))
    assert total == weights
    assert all(part.seconds > 0 for part in (profile.embedding, *profile.layers, profile.head))
    assert "a prompt of 20 tokens" in profile.measured and "cpu" in profile.measured
    assert spec.name in profile.measured
