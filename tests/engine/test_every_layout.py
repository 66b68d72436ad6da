"""Every legal layout gives what transformers gives, on real ranks: of a dense GQA model, a tied one, two of experts.

All layouts of up to four ranks, with their options, and at eight ranks one for every pair of axes; and contexts of
4,096 where positions are shared out.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from every_layout import KINDS, SPECS, at_eight, make_kinds, named, pairs_at_eight, up_to_four
from hard_batch import Answer, answer_all, assert_as_transformers, assert_parity
from real_ranks import RealRanks
from tiny_models import make_checkpoint, prompts

from labkit.engine.core import EngineSettings
from labkit.layout import AXES, Layout
from labkit.model.spec import load_spec

pytestmark = [pytest.mark.engine, pytest.mark.slow]
FOUR = [(kind, layout) for kind, spec in SPECS.items() for layout in up_to_four(spec)]
EIGHT = [(kind, layout) for kind, spec in SPECS.items() for layout in at_eight(spec)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_kinds(tmp_path_factory.mktemp("checkpoints"))


def test_the_lists_are_those_of_the_models_that_run(folders: dict[str, Path]) -> None:
    for kind, folder in folders.items():
        spec = load_spec(folder)
        assert [layout for of, layout in FOUR if of == kind] == up_to_four(spec)
        pairs = set(combinations(AXES if spec.moe else AXES[:-1], 2))
        assert set(pairs_at_eight(spec)) == pairs


@pytest.mark.parametrize(("kind", "layout"), FOUR, ids=named)
def test_a_layout_of_up_to_four_ranks_gives_what_transformers_gives(
    four: RealRanks, folders: dict[str, Path], kind: str, layout: Layout
) -> None:
    assert_parity(four, folders[kind], layout)


@pytest.mark.parametrize(("kind", "layout"), EIGHT, ids=named)
def test_a_pair_of_axes_at_eight_ranks_gives_what_transformers_gives(
    eight: RealRanks, folders: dict[str, Path], kind: str, layout: Layout
) -> None:
    assert_parity(eight, folders[kind], layout)


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, changes = KINDS["dense"]
    return make_checkpoint(tmp_path_factory.mktemp("long"), family, max_position_embeddings=4200, **changes)


@pytest.mark.parametrize("slug", ["tp4xdcp2", "pcp2xdcp2+ring", "pcp3xdcp3", "pp2xpcp2+ring", "dp2xpcp2"])
def test_a_context_of_4096_gives_what_transformers_gives(four: RealRanks, long_folder: Path, slug: str) -> None:
    """Chunks of 500 tokens, which no number of ranks divides as blocks do, and a short prompt beside."""
    settings = EngineSettings(layout=Layout.parse(slug), memory_per_rank=2**26, max_num_batched_tokens=500)
    asked = prompts([4096, 37, 4095])

    async def scenario() -> list[Answer]:
        await four.stand(str(long_folder), settings)
        return await answer_all(four, asked)

    assert_as_transformers(long_folder, four.run(scenario()))
