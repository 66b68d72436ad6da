"""Axes beside each other, on ranks as threads: each kind of model gives what transformers gives.

Every two axes that a family's own tests do not put together stand beside each other here once; all of them, on real
ranks, are in `test_every_layout`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from every_layout import make_kinds
from test_parity import NUM_NEW
from thread_ranks import ThreadRanks, serve
from tiny_models import SMALL, assert_same, make_checkpoint, prompts

CASES = {
    "dense": ["pp3+split=1-1-2", "pp2xtp2", "pp2xpcp2+ring", "dp2xpcp2xdcp2"],
    "tied": ["pp4", "pp2xtp2xdcp2", "pp2xpcp2xdcp2+ring", "pcp2xtp2xdcp4"],
    "experts": ["pcp2xtp2xdcp2xep4+ring", "pp2xpcp2xep2"],
    "shared-experts": ["pp2xtp2xdcp2xep2+split=3-1", "pp2xpcp2xdcp2xep2+ring"],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_kinds(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize(("kind", "layout"), [(kind, slug) for kind, slugs in CASES.items() for slug in slugs])
def test_axes_go_together(folders: dict[str, Path], kind: str, layout: str) -> None:
    ranks = ThreadRanks(folders[kind], layout)
    head = prompts([16], seed=1)[0]
    asked = [head + prompts([5], seed=2)[0], *prompts([1, 7, 9, 25]), head + prompts([1], seed=3)[0]]
    assert_same(folders[kind], serve(ranks, asked[:5], NUM_NEW, budget=16, logprobs=SMALL["vocab_size"]))
    shared = [asked[0], asked[5]]
    assert_same(folders[kind], serve(ranks, shared, NUM_NEW, shared=2, logprobs=SMALL["vocab_size"]))


def test_positions_are_shared_out_over_pcp_also_where_every_kv_head_has_its_own_rank(tmp_path: Path) -> None:
    """tp 4 × pcp 2 × dcp 2 of 8 KV heads: the two copies of each are those of the pcp ranks."""
    folder = make_checkpoint(tmp_path, "llama-untied-biases", num_key_value_heads=8)
    ranks = ThreadRanks(folder, "tp4xpcp2xdcp2")
    assert_same(folder, serve(ranks, prompts([1, 17, 9]), NUM_NEW, budget=16, logprobs=SMALL["vocab_size"]))
