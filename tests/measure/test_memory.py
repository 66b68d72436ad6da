"""Counted beside measured, part by part: what TP2 halves, what it copies, what nobody can measure."""

from __future__ import annotations

import json

import pytest

from labkit.layout import Layout, kv_bytes_per_token, rank_memory
from labkit.measure.memory import BESIDE, memory_account, part_by_part
from labkit.model.spec import load_spec

MIB = 2**20
SPEC = load_spec("lab-5m")


def _summary(layout: str, **fields) -> dict:
    parsed = Layout.parse(layout)
    settings = {"memory_per_rank": 40 * MIB, "block_size": 16, "max_num_seqs": 64, "max_num_batched_tokens": 512}
    rows = []
    for rank in range(parsed.world_size):
        parts = rank_memory(parsed, SPEC, rank, 4)
        if "embedding" in parts and "head" not in parts:
            parts["head"] = parts["embedding"]  # packed beside the embedding it is tied to
        weights, block = sum(parts.values()), 16 * kv_bytes_per_token(parsed, SPEC, rank, 4)
        kv = (40 * MIB - weights) // block * block
        rows.append({"rank": rank, "weights": weights, "kv": kv, "other": 0, "free": 40 * MIB - weights - kv,
                     "weights_by_part": parts, "beside": dict.fromkeys(BESIDE)})  # fmt: skip
    return {"layout": layout, "model": "lab-5m", "environment": {"dtype": "float32"}, "settings": settings,
            "memory_bytes": rows} | fields  # fmt: skip


def test_counted_stands_beside_measured_and_the_tied_head_is_the_difference():
    (rank,) = memory_account(_summary("tp1")).ranks
    differences = {item.name: item.difference for item in rank.items if item.difference is not None}
    head = rank.of("head")
    assert head.counted == 0 and head.difference == head.measured == rank.of("embedding").measured
    assert {name for name, value in differences.items() if value} == {"head"}
    assert rank.of("kv").counted == rank.of("kv").measured > 0


def test_split_and_replicated_weights_stand_apart():
    one, two = (memory_account(_summary(layout)).ranks[0] for layout in ("tp1", "tp2"))
    assert {item.kind for item in one.items if item.kind} == {"whole"}
    assert two.of("norm").kind == "replicated" and two.of("mlp").kind == "split"
    assert two.weights("replicated") == two.of("norm").measured
    assert two.weights("split") * 2 + two.weights("replicated") == one.weights("whole")
    assert memory_account(_summary("dp2")).ranks[1].of("mlp").kind == "replicated"


def test_tp2_does_not_halve_everything():
    ratios = {change.name: change.ratio for change in part_by_part(*map(memory_account, map(_summary, ("tp1", "tp2"))))}
    assert ratios["mlp"] == ratios["attention"] == 0.5 and ratios["norm"] == 1
    assert ratios["kv"] > 1, "the room that weights leave is KV's"
    assert 0.5 < ratios["activations"] <= 1, "residual rows are every rank's"
    assert ratios["slack"] is None


def test_what_cannot_be_measured_is_none_and_said_so_and_what_can_is_shown():
    account = memory_account(_summary("tp1"))
    assert account.unmeasured == list(BESIDE) and account.ranks[0].of("activations").counted > 0
    assert "Not measurable on this backend: activations" in repr(account) and "slack" in account._repr_html_()
    told = _summary("tp1")
    told["memory_bytes"][0]["beside"] = {"activations": 3 * MIB, "workspace": 0, "graphs": 0, "slack": MIB}
    account = memory_account(told)
    assert account.unmeasured == [] and account.ranks[0].of("workspace").measured == 0
    assert account.largest("activations") == 3 * MIB
    assert json.dumps(account.to_dict())


def test_a_budget_that_the_device_chose_leaves_kv_uncounted():
    summary = _summary("tp1")
    summary["settings"]["memory_per_rank"] = 0
    account = memory_account(summary)
    assert account.ranks[0].of("kv").counted is None and "KV is not counted" in repr(account)


def test_an_unknown_model_is_measured_only_and_a_foreign_server_not_at_all():
    account = memory_account(_summary("tp2", model="somebody-s"))
    assert account.ranks[1].of("mlp").counted is None and account.ranks[1].of("mlp").measured > 0
    assert "told nothing" in repr(memory_account({"layout": None, "memory_bytes": []}))


@pytest.mark.parametrize("layout", ["pp2", "tp2xpp2", "pcp2", "tp4"])
def test_every_part_of_every_layout_is_counted_as_it_was_measured(layout: str):
    for rank in memory_account(_summary(layout)).ranks:
        assert all(not item.difference for item in rank.items if item.name not in ("head", "kv"))
