"""The simulator's pool that only counts: blocks of those that do not come back, and of those that may."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from labkit.engine.blocks import BlockPool
from labkit.plan.sim.pool import CountedPool
from labkit.plan.sim.request import Held


class _Both:
    """The engine's pool over block numbers and the simulator's over counts, told the same."""

    def __init__(self, num_blocks: int) -> None:
        self.real, self.counted = BlockPool(num_blocks, 1), CountedPool(num_blocks, 1)
        self.held: list[tuple[list[int], Held, int]] = []
        self.gone: list[tuple[tuple[int, ...], Held]] = []
        self.num_requests = 0

    def take(self, count: int, full: int) -> None:
        """A new request of `count` blocks; `full` of them become known, each by a token of its own."""
        self.num_requests += 1
        blocks, node = self.real.allocate(count), 0
        for place in range(full):
            node = self.real.publish(blocks[place], node, (self.num_requests * 1000 + place,))
        self.counted.lend(count)
        held = Held()
        held.count, held.full = count, full
        self.held.append((blocks, held, self.num_requests))

    def give_back(self, place: int, comes_back: bool) -> None:
        blocks, held, number = self.held.pop(place)
        self.real.release(blocks)
        if comes_back:
            self.gone.append((tuple(number * 1000 + i for i in range(held.full)), held))
            self.counted.release(held)
        else:
            self.counted.release_for_good(held.count, held.full)

    def check(self) -> None:
        assert self.counted.num_free == self.real.num_free
        known_free = sum(block in self.real._evictable for block in range(self.real.num_blocks))
        assert self.counted.num_cached == known_free
        for tokens, held in self.gone:
            found = self.counted.match(SimpleNamespace(blocks=held), len(tokens))
            assert len(found) == len(self.real.match(tokens, len(tokens)))


@pytest.mark.parametrize("seed", range(12))
def test_it_frees_and_evicts_what_the_engines_pool_does(seed):
    draw, both = random.Random(seed), _Both(60)
    for _ in range(300):
        count = draw.randint(1, 12)
        if count <= both.real.num_free and draw.random() < 0.6:
            both.take(count, draw.randint(0, count))
        elif both.held:
            both.give_back(draw.randrange(len(both.held)), draw.random() < 0.3)
        both.check()


def test_those_that_do_not_come_back_are_one_run():
    pool = CountedPool(1000, 16)
    for _ in range(50):
        pool.lend(10)
        pool.release_for_good(10, 8)
    assert len(pool._segments) == 1 and pool.num_cached == 400 and pool.num_free == 1000
