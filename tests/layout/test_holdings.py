"""Who holds what in pools with roles: weights are there in each pool, KV in none but its own."""

from __future__ import annotations

from labkit.layout import holdings, read_layout
from labkit.model.spec import load_spec

SPEC = load_spec("lab-5m")


def held(text: str, rank: int) -> dict[str, tuple[str, int, int]]:
    found = holdings(read_layout(text), SPEC, rank, 4, kv_bytes=1)
    return {each.part: (each.kind, each.of, each.copies) for each in found}


def test_each_pool_has_all_weights_and_its_own_kv() -> None:
    for rank in (0, 1):
        found = held("prefill:tp1,decode:tp1", rank)
        assert found["attention"] == found["norm"] == ("replicated", 1, 2)
        assert found["kv"] == ("partitioned", 1, 1)


def test_what_is_cut_in_its_pool_is_held_once_more_in_the_other() -> None:
    assert held("prefill:tp2,decode:tp1", 1)["mlp"] == ("partitioned", 2, 2)
    assert held("prefill:tp2,decode:tp1", 1)["norm"] == ("replicated", 1, 3)
    assert held("prefill:tp2,decode:tp1", 2)["mlp"] == ("replicated", 1, 2)


def test_a_layout_alone_is_as_before() -> None:
    assert held("tp1", 0)["mlp"] == ("partitioned", 1, 1) and held("dp2", 1)["mlp"] == ("replicated", 1, 2)
