"""A rank is killed in each kind of layout, while a prompt is read and while tokens are made: see `drill`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from labkit.engine.messages import Fault
from labkit.layout import Layout
from labkit.model.spec import model_dir
from tests.engine.real_ranks import RealRanks
from tests.faults.drill import NUM_NEW, SHORT, drill, ends_by_name, ranks_to_drill, settings

pytestmark = pytest.mark.engine
DENSE, FEW_HEADS, EXPERTS = "lab-5m", "lab-5m with 2 KV heads", "lab-moe-8x"
KINDS = [
    (DENSE, "tp4", 2),
    (DENSE, "dp2xtp2", 3),
    (DENSE, "pp3", 1),
    (DENSE, "dp2xpp2", 2),
    (DENSE, "pcp4", 1),
    (DENSE, "pcp2xtp2+ring", 3),
    (DENSE, "pp2xpcp2", 0),
    (DENSE, "pcp4xdcp4", 2),
    (FEW_HEADS, "tp4xdcp2", 1),
    (EXPERTS, "tp4xep4", 2),
    (EXPERTS, "pcp2xtp2xep4", 1),
    (EXPERTS, "dp2xtp2xep4", 3),
    (EXPERTS, "pp2xtp2xep2", 0),
]
"""Model, layout, and the rank that is killed."""
ALWAYS = ("dp2xpp2", "decode")
"""The other drills are slow ones."""
CASES = [
    pytest.param(*kind, moment, marks=[] if (kind[1], moment) == ALWAYS else pytest.mark.slow)
    for kind in KINDS
    for moment in ("prefill", "decode")
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By name; lab-5m with fewer KV heads, of which tp 4 has two copies to share positions out over, is made here."""
    folder = tmp_path_factory.mktemp("few-heads")
    config = json.loads((model_dir(DENSE) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 2}))
    return {DENSE: DENSE, EXPERTS: EXPERTS, FEW_HEADS: str(folder)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRanks]:
    with ranks_to_drill(tmp_path_factory.mktemp("pool")) as made:
        yield made


@pytest.mark.parametrize(("model", "slug", "rank", "moment"), CASES)
def test_a_killed_rank_ends_every_stream_by_name_and_the_pool_serves_again(
    ranks: RealRanks, models: dict[str, str], model: str, slug: str, rank: int, moment: str
) -> None:
    drill(ranks, models[model], slug, rank, moment)


def test_a_rank_that_raises_in_a_shared_exchange_is_named(ranks: RealRanks) -> None:
    """Rank 1 is the replica that sleeps; rank 0, whose request it is, stands in an exchange and is not blamed."""

    async def scenario() -> None:
        await ranks.stand(EXPERTS, settings(Layout.parse("dp2xep2")))
        stream = ranks.ask(SHORT, NUM_NEW)
        await anext(stream)
        began = time.monotonic()
        ranks.pool.send(1, Fault("raise"))
        await ends_by_name([stream], "Rank 1 raised RuntimeError")
        assert time.monotonic() - began < 5
        await ranks.ready()
        assert len(await ranks.tokens(SHORT, 8)) == 8

    ranks.run(scenario())
