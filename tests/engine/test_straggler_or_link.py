"""A straggler and a slow link are different diseases: each is put in, by a known amount, and the recorder tells which.

Figures within a tenth of what was put in. What holds whatever the load is in test_nodes_parity.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
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
RATE = 100 * 10**6
"""A prompt's message takes a tenth of a second."""
TURNS, TOKENS = 16, 40
"""Over gloo a sum takes half a millisecond or, when a thread waits for the scheduler's tick, four: of so many the
median is known to a tenth of what is put in."""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRanks]:
    """On a node each, joined by the link."""
    with real_ranks(tmp_path_factory.mktemp("2x1"), nodes=Nodes(2, 1, Link(RATE))) as ranks:
        ranks.run(ranks.stand(MODEL, SETTINGS))
        ranks.run(ranks.tokens([1, 2, 3], 3))
        yield ranks


@pytest.fixture(scope="module")
def straggled(two: RealRanks) -> NDArray[np.void]:
    """Rows of decode steps in which rank 1 comes late to LAYER."""
    return np.concatenate([decoded(two, DELAY_S, TOKENS) for _ in range(TURNS)])


def late_and_elsewhere(rows: NDArray[np.void]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Wait and transfer of rank 0's sums, µs: of LAYER, and of the other layers in the same steps."""
    mine = sums(rows, 0)
    late, elsewhere = (medians_us(mine[(mine["layer"] == LAYER) == is_late]) for is_late in (True, False))
    return late, elsewhere


def test_five_milliseconds_put_in_are_five_milliseconds_of_wait(straggled: NDArray[np.void]) -> None:
    """Against the other layers' sums of the very same steps: what else the machine does weighs on both alike."""
    (wait, transfer), (wait_elsewhere, transfer_elsewhere) = late_and_elsewhere(straggled)
    print(f"put in {DELAY_S * 1e6:.0f} µs: wait {wait:.0f} µs, elsewhere {wait_elsewhere:.0f}; "
          f"transfer {transfer:.0f} µs, elsewhere {transfer_elsewhere:.0f}")  # fmt: skip
    assert wait - wait_elsewhere == pytest.approx(DELAY_S * 1e6, rel=0.1)
    assert abs(transfer - transfer_elsewhere) <= 0.1 * DELAY_S * 1e6, "none of it is taken for the link's"


def test_the_shortest_call_tells_the_same_where_clocks_are_not_one(straggled: NDArray[np.void]) -> None:
    """The same rows, with one rank's clock ten minutes ahead: the wait is what it is by one clock."""
    pieces = [(rank, 0, 1, ring_of(straggled, rank, rank * 600 * 10**9)) for rank in (0, 1)]
    both = merge(pieces, shared_clock=False)
    (wait, transfer), (_, transfer_elsewhere) = late_and_elsewhere(both.rows)
    (wait_by_one_clock, _), _ = late_and_elsewhere(straggled)
    print(f"by the shortest call: wait {wait:.0f} µs, by one clock {wait_by_one_clock:.0f} µs; "
          f"transfer {transfer:.0f} µs, elsewhere {transfer_elsewhere:.0f}")  # fmt: skip
    assert wait == pytest.approx(wait_by_one_clock, rel=0.1)
    assert abs(transfer - transfer_elsewhere) <= 0.1 * DELAY_S * 1e6


def test_a_message_through_the_link_takes_its_bytes_over_its_rate(two: RealRanks) -> None:
    """Every byte that crossed is counted at the link: segments' headers, acknowledgements of the other way."""
    node = next(name for name in of_owner(os.getpid()) if name.endswith("-n0"))
    before = bytes_sent(node)
    rows = prefills(two, 6, PROMPT_TOKENS)
    crossed = (bytes_sent(node) - before) / rows[rows["rank"] == 0]["bytes"].sum()
    assert WIRE < crossed < 1.1, "what was given, once, in segments"
    put_in_us = through_the_link_us(PROMPT_TOKENS, RATE) * crossed / WIRE
    for rank in (0, 1):
        wait_us, transfer_us = medians_us(sums(rows, rank))
        print(f"rank {rank}: put in {put_in_us:.0f} µs ({crossed:.3f} bytes a byte given): transfer "
              f"{transfer_us:.0f} µs, wait {wait_us:.0f} µs")  # fmt: skip
        assert transfer_us == pytest.approx(put_in_us, rel=0.1)
        assert wait_us < 0.1 * put_in_us
