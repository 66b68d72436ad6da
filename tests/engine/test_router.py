"""Routing: work counts, not requests; ties rotate; a cached prefix is worth what it saves."""

from __future__ import annotations

from collections import Counter

import pytest

from labkit.engine.blocks import BlockPool
from labkit.engine.request import Request, SamplingParams
from labkit.engine.router import ReplicaView, Router
from labkit.engine.scheduler import Scheduler, SchedulerConfig


def idle(count: int) -> list[ReplicaView]:
    return [ReplicaView(0, 1000)] * count


@pytest.mark.parametrize("policy", ["least-work", "round-robin", "prefix"])
def test_ten_arrivals_at_three_idle_replicas_are_spread(policy: str) -> None:
    router = Router(policy)
    chosen = [router.choose(50, idle(3))[0] for _ in range(10)]
    assert sorted(Counter(chosen).values()) == [3, 3, 4]


def test_one_long_prompt_outweighs_three_short_ones() -> None:
    schedulers = [Scheduler(SchedulerConfig(max_context=20_000), BlockPool(2000, 16)) for _ in range(2)]
    schedulers[0].add(Request("long", (1,) * 10_000, SamplingParams(max_tokens=10), 0))
    for i in range(3):
        schedulers[1].add(Request(f"short{i}", (1,) * 50, SamplingParams(max_tokens=10), 0))
    index, reason = Router("least-work").choose(50, [scheduler.view() for scheduler in schedulers])
    assert index == 1
    assert reason == "least work: 177 tokens, the next has 10009"


def test_ties_are_broken_by_turn_also_among_the_busy() -> None:
    router = Router("least-work")
    views = [ReplicaView(500, 0), ReplicaView(100, 0), ReplicaView(100, 0)]
    assert [router.choose(10, views)[0] for _ in range(4)] == [1, 2, 1, 2]
    assert "a tie, its turn" in router.choose(10, views)[1]


def test_round_robin_looks_at_nothing() -> None:
    router = Router("round-robin")
    views = [ReplicaView(10_000, 0), ReplicaView(0, 1000)]
    assert [router.choose(10, views)[0] for _ in range(4)] == [0, 1, 0, 1]


def test_a_cached_prefix_wins_until_the_queue_there_costs_more_than_it_saves() -> None:
    router = Router("prefix")
    cold = ReplicaView(0, 10_000)
    assert router.choose(500, [ReplicaView(300, 10_000, cached_tokens=400), cold])[0] == 0
    assert router.choose(500, [ReplicaView(401, 10_000, cached_tokens=400), cold])[0] == 1


def test_a_replica_without_room_for_the_prompt_is_avoided() -> None:
    router = Router("prefix")
    assert router.choose(500, [ReplicaView(0, 100), ReplicaView(300, 10_000)])[0] == 1


def test_the_reason_names_work_cache_and_room_and_the_time_when_it_is_known() -> None:
    views = [ReplicaView(900, 50), ReplicaView(100, 640, cached_tokens=48, us_per_token=500.0)]
    index, reason = Router("prefix").choose(64, views)
    assert index == 1
    assert reason == (
        "prefix: least delay, 116 tokens (about 58 ms): 100 ahead, 48 of 64 cached, KV room for 640"
    )


def test_an_unknown_policy_is_refused_with_the_choice() -> None:
    with pytest.raises(
        ValueError, match="'random' is unknown: choose one of least-work, round-robin, prefix"
    ):
        Router("random")
