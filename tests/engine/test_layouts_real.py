"""Every family on four real ranks under torchrun gives what transformers gives: tokens exactly, logits within 1e-4.

Each axis, alone and beside others, under the batch of `hard_batch`; `test_every_layout` goes through all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hard_batch import BLOCK_SIZE, assert_parity
from real_ranks import RealRanks
from tiny_models import make_checkpoint

from labkit.engine.core import EngineSettings
from labkit.layout import Layout

pytestmark = pytest.mark.engine
MODELS = {
    "llama-tied-llama3-rope": {"num_key_value_heads": 2},
    "llama-untied-biases": {},
    "qwen2-qkv-bias": {},
    "qwen3-qk-norm-own-head-dim": {},
    "mistral": {},
    "mistral-window": {},
    "mixtral": {"num_key_value_heads": 2},
    "qwen2-moe-shared": {},
    "qwen3-moe-dense-layer": {},
}
LAYOUTS = {
    "llama-tied-llama3-rope": ["tp4", "tp2xpcp2xdcp2+ring"],
    "llama-untied-biases": ["tp1", "dp2xpp2"],
    "qwen2-qkv-bias": ["tp4xdcp2", "dp2xpcp2"],
    "qwen3-qk-norm-own-head-dim": ["tp4", "pp2xpcp2"],
    "mistral": ["pcp3+ring"],
    "mistral-window": ["pp2xtp2+split=3-1", "tp2xpcp2xdcp4+ring"],
    "mixtral": ["tp4xdcp2xep4"],
    "qwen2-moe-shared": ["dp4xep4", "tp2xpcp2xep4"],
    "qwen3-moe-dense-layer": ["dp2xtp2xep4", "pp2xtp2xep2"],
}
CASES = [(family, slug) for family, slugs in LAYOUTS.items() for slug in slugs]
CAPACITIES = [
    ("llama-untied-biases", "pcp2", "pcp2xdcp2"),
    ("llama-tied-llama3-rope", "tp4", "tp4xdcp2"),
    ("mistral-window", "tp2", "tp2xdcp2"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        family: make_checkpoint(folder, family, num_hidden_layers=4, **changes) for family, changes in MODELS.items()
    }


@pytest.mark.parametrize(("family", "slug"), CASES)
def test_layout_gives_what_transformers_gives(
    four: RealRanks, folders: dict[str, Path], family: str, slug: str
) -> None:
    assert_parity(four, folders[family], Layout.parse(slug))


@pytest.mark.parametrize(("family", "whole", "shared"), CAPACITIES)
def test_sharing_positions_out_multiplies_the_tokens_that_fit(
    four: RealRanks, folders: dict[str, Path], family: str, whole: str, shared: str
) -> None:
    before, after = (resident_tokens(four, folders[family], Layout.parse(slug)) for slug in (whole, shared))
    assert after / before == pytest.approx(2, rel=0.05)


def resident_tokens(ranks: RealRanks, folder: Path, layout: Layout) -> int:
    """With one budget a rank, and a limit on sequences that no pool of it reaches."""
    settings = EngineSettings(
        layout=layout, memory_per_rank=2**21, block_size=BLOCK_SIZE, max_num_batched_tokens=512, max_num_seqs=512
    )
    ranks.run(ranks.stand(str(folder), settings))
    (replica,) = ranks.engine.state()["replicas"]
    return int(replica["kv_total_blocks"] * replica["kv_block_tokens"])
