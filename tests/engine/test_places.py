"""Which fabric a group gets, and whose clocks are one."""

from __future__ import annotations

import pytest

from labkit.engine.messages import Hello
from labkit.engine.places import describe_places, nodes_of, share_a_clock
from labkit.layout import Layout
from labkit.layout.fabrics import fabric_of, group_fabrics

_TWO_BY_TWO = [0, 0, 1, 1]


def _hellos(nodes: list[int], clocks: list[str] | None = None) -> dict[int, Hello]:
    clocks = clocks or ["one"] * len(nodes)
    return {
        rank: Hello("", rank, 1, f"host{node}", False, node=node, clock=clock)
        for rank, (node, clock) in enumerate(zip(nodes, clocks, strict=True))
    }


@pytest.mark.parametrize(
    ("ranks", "fabric", "nodes", "carrier"),
    [
        ((0, 1), "shm", _TWO_BY_TWO, "shm"),
        ((1, 2), "shm", _TWO_BY_TWO, "gloo"),
        ((0, 1, 2, 3), "shm", [], "shm"),
        ((0, 3), "nccl", _TWO_BY_TWO, "nccl"),
        ((0, 1), "gloo", _TWO_BY_TWO, "gloo"),
    ],
)
def test_shared_memory_ends_at_the_node(
    ranks: tuple[int, ...], fabric: str, nodes: list[int], carrier: str
) -> None:
    assert fabric_of(ranks, fabric, nodes) == carrier


def test_every_group_that_traffic_can_cross_is_told_with_its_carrier() -> None:
    told = group_fabrics(Layout.parse("dp2xtp2"), "shm", _TWO_BY_TWO)
    assert {(group.axis, group.ranks): group.fabric for group in told} == {
        ("tp", (0, 1)): "shm", ("tp", (2, 3)): "shm", ("dp", (0, 2)): "gloo", ("dp", (1, 3)): "gloo",
        ("world", (0, 1, 2, 3)): "gloo",
    }  # fmt: skip


def test_one_node_is_no_nodes() -> None:
    assert nodes_of(_hellos([0, 0])) == [] and nodes_of(_hellos(_TWO_BY_TWO)) == _TWO_BY_TWO


def test_clocks_are_one_on_one_machine_only_and_never_on_gpus() -> None:
    assert share_a_clock(_hellos(_TWO_BY_TWO), "cpu")
    assert not share_a_clock(_hellos([0, 1], ["one", "other"]), "cpu")
    assert not share_a_clock(_hellos(_TWO_BY_TWO), "cuda")


def test_before_the_ranks_have_come_there_are_no_groups_to_tell() -> None:
    told = describe_places({}, "cpu", Layout.parse("tp2"), "shm")
    assert told["nodes"] == [] and told["groups"] == []
