"""Which fabric a group gets, and whose clocks are one."""

from __future__ import annotations

import time

import numpy as np
import pytest

from labkit.engine.clock import Clocks, Offset, clock_id
from labkit.engine.messages import Hello, Sampled, StepStats
from labkit.engine.places import describe_places, nodes_of, share_a_clock
from labkit.layout import Layout
from labkit.layout.fabrics import fabric_of, group_fabrics
from labkit.measure.recorder import RING_DTYPE

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


# ---- clocks


def test_an_offset_is_the_smallest_difference_seen_and_may_drift() -> None:
    offset = Offset(there_ns=0, here_ns=1_000_000)
    offset.learn(there_ns=10_000_000, here_ns=10_400_000)
    assert offset.ns == 400_000
    offset.learn(there_ns=20_000_000, here_ns=29_000_000)
    assert 400_000 < offset.ns < 402_000, "late messages count only as far as clocks drift"


def _ring(*enters_ns: int) -> bytes:
    rows = np.zeros(len(enters_ns), RING_DTYPE)
    rows["enter_ns"] = enters_ns
    rows["exit_ns"] = rows["enter_ns"] + 5
    return rows.tobytes()


def test_a_foreign_ranks_instants_are_put_on_this_clock_its_durations_kept() -> None:
    clocks, ahead_ns = Clocks(), 3_600 * 10**9
    there = time.monotonic_ns() + ahead_ns
    clocks.joined(Hello("", 1, 1, "elsewhere", False, clock_ns=there, clock="elsewhere"), time.monotonic_ns())
    message = StepStats(0, 0, 1, there + 1_000, there + 9_000, _ring(there + 2_000))
    clocks.translate(1, message)
    rows = np.frombuffer(message.ring, RING_DTYPE)
    assert abs(message.end_ns - time.monotonic_ns()) < 50_000_000
    assert message.end_ns - message.start_ns == 8_000
    assert rows["enter_ns"][0] - message.start_ns == 1_000 and rows["exit_ns"][0] - rows["enter_ns"][0] == 5


def test_ranks_of_this_machine_are_left_alone() -> None:
    clocks = Clocks()
    clocks.joined(Hello("", 0, 1, "here", False, clock_ns=1, clock=clock_id()), 10**9)
    message = Sampled(0, 0, [1], None, 5, 6)
    clocks.translate(0, message)
    assert (message.start_ns, message.end_ns) == (5, 6)
