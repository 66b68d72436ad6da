"""One rank a GPU, over NCCL: each axis gives what transformers gives, tokens exactly and logits within 1e-4 (float32).

The same batch as on CPUs, with decode steps plain and as graphs. Needs two GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hard_batch import assert_parity
from real_ranks import RealRanks, real_ranks
from tiny_models import make_checkpoint

from labkit.layout import Layout

pytestmark = [pytest.mark.multi_gpu, pytest.mark.engine]
ONE_HEAD = {"num_key_value_heads": 1}
CASES = [
    ("llama-tied-llama3-rope", "tp2", {}),
    ("llama-untied-biases", "dp2", {}),
    ("mistral", "pp2", {}),
    ("mistral-window", "pcp2", {}),
    ("mistral-window", "pcp2xdcp2+ring", {}),
    ("qwen2-qkv-bias", "tp2xdcp2", ONE_HEAD),
    ("mixtral", "tp2xep2", {}),
    ("qwen2-moe-shared", "dp2xep2", {}),
]


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRanks]:
    with real_ranks(tmp_path_factory.mktemp("pool"), num_ranks=2, device="cuda") as made:
        yield made


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("family", "slug", "changes"), CASES, ids=lambda value: value if type(value) is str else "")
def test_layout_over_nccl_gives_what_transformers_gives(
    two_gpus: RealRanks, tmp_path: Path, family: str, slug: str, changes: dict[str, int], graphs: bool
) -> None:
    folder = make_checkpoint(tmp_path, family, **changes)
    assert_parity(two_gpus, folder, Layout.parse(slug), fabric="nccl", graphs=graphs)
    assert {group["fabric"] for group in two_gpus.engine.state()["groups"]} <= {"nccl"}
