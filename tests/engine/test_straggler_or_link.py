"""A straggler and a slow link are different diseases: each is put in, by a known amount, and the recorder tells which.

Figures within a tenth of what was put in. What holds whatever the load is in test_nodes_parity.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from put_in import (
    DELAY_S,
    LAYER,
    MODEL,
    PROMPT_TOKENS,
    SETTINGS,
    WIRE,
    decoded,
    medians_us,
    prefills,
    ring_of,
    sums,
    through_the_link_us,
)
from real_ranks import RealRanks, real_ranks

from labkit.cluster.nodes import Link, Nodes
from labkit.measure.recorder import merge
from tests.cluster.made_nodes import bytes_sent, needs_nodes, of_owner

pytestmark = [needs_nodes, pytest.mark.engine, pytest.mark.slow]
RATE = 25 * 10**6
"""A prompt's message takes a third of a second, beside which what a busy machine adds is little."""
TURNS = 4


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRanks]:
    """On a node each, joined by the link."""
    with real_ranks(tmp_path_factory.mktemp("2x1"), nodes=Nodes(2, 1, Link(RATE))) as ranks:
        ranks.run(ranks.stand(MODEL, SETTINGS))
        ranks.run(ranks.tokens([1, 2, 3], 3))
        yield ranks


def in_a_quiet_moment(measure: Callable[[], None]) -> None:
    """Some turns: what other processes take from the ranks is put in too, and nobody knows how much that was."""
    for turn in range(TURNS):
        try:
            return measure()
        except AssertionError:
            if turn == TURNS - 1:
                raise


def test_five_milliseconds_put_in_are_five_milliseconds_of_wait(two: RealRanks) -> None:
    """Turn about, so that what else the machine does weighs on both alike."""

    def measure() -> None:
        turns = [decoded(two, delay_s, 40) for delay_s in (0.0, DELAY_S) * 2]
        before, after = (medians_us(sums(np.concatenate(turns[at::2]), 0, LAYER)) for at in (0, 1))
        print(f"put in {DELAY_S * 1e6:.0f} µs: wait {before[0]:.0f} → {after[0]:.0f} µs, "
              f"transfer {before[1]:.0f} → {after[1]:.0f} µs")  # fmt: skip
        assert after[0] - before[0] == pytest.approx(DELAY_S * 1e6, rel=0.1)
        assert after[1] - before[1] <= 0.1 * DELAY_S * 1e6, "none of it is taken for the link's"

    in_a_quiet_moment(measure)


def test_the_shortest_call_tells_the_same_where_clocks_are_not_one(two: RealRanks) -> None:
    """The same rows, with one rank's clock ten minutes ahead: the wait is what it is by one clock."""
    rows = decoded(two, DELAY_S, 80)
    both = merge([(rank, 0, 1, ring_of(rows, rank, rank * 600 * 10**9)) for rank in (0, 1)], shared_clock=False)
    apart, together = (medians_us(sums(each, 0, LAYER)) for each in (both.rows, rows))
    print(f"by the shortest call: wait {apart[0]:.0f} µs, by one clock {together[0]:.0f} µs")
    assert apart[0] == pytest.approx(together[0], rel=0.1)
    assert abs(apart[1] - together[1]) <= 0.1 * together[0]


def test_a_message_through_the_link_takes_its_bytes_over_its_rate(two: RealRanks) -> None:
    """Every byte that crossed is counted at the link: headers of segments, acknowledgements of what came the other way.

    A message is never quicker than they are, and slower by what else the machine does; so the lower quartile counts.
    """
    node = next(name for name in of_owner(os.getpid()) if name.endswith("-n0"))

    def measure() -> None:
        before = bytes_sent(node)
        rows = prefills(two, 2, PROMPT_TOKENS)
        crossed = (bytes_sent(node) - before) / rows[rows["rank"] == 0]["bytes"].sum()
        assert WIRE < crossed < 1.1, "what was given, once, in segments"
        put_in_us = through_the_link_us(PROMPT_TOKENS, RATE) * crossed / WIRE
        for rank in (0, 1):
            _, transfer_us = medians_us(sums(rows, rank), 25)
            wait_us, median_us = medians_us(sums(rows, rank))
            print(f"rank {rank}: put in {put_in_us:.0f} µs ({crossed:.3f} bytes a byte given): transfer "
                  f"{transfer_us:.0f} µs (median {median_us:.0f}), wait {wait_us:.0f} µs")  # fmt: skip
            assert transfer_us == pytest.approx(put_in_us, rel=0.1)
            assert wait_us < 0.1 * put_in_us

    in_a_quiet_moment(measure)
