"""A straggler and a slow link are different diseases: each is put in, by a known amount, and the recorder tells which.

The straggler sleeps before each sum over ranks of one layer. The link's rate is shaped between two emulated nodes; what
a sum of S bytes over two ranks sends through it each way is S (half of it twice, in gloo's ring), in TCP segments of
1448 bytes that are 1514 on the wire. Neither can be quicker than what was put in, which a busy machine leaves true; the
figures themselves, within a tenth, are timed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from real_ranks import RealRanks, real_ranks

from labkit.cluster.nodes import Link, Nodes
from labkit.engine.core import EngineSettings
from labkit.engine.messages import Fault
from labkit.layout import Layout
from labkit.measure.breakdown import unaccounted_share
from labkit.measure.collective_log import as_frame
from labkit.measure.lateness import who_is_late
from labkit.measure.recorder import OP_CODES, PREFILL, RING_DTYPE, merge
from labkit.model.spec import load_spec
from tests.cluster.made_nodes import bytes_sent, needs_nodes, of_owner

pytestmark = [needs_nodes, pytest.mark.engine]
MODEL, LAYER, DELAY_S = "lab-5m", 3, 0.005
RATE = 100 * 10**6
WIRE = 1514 / 1448
PROMPT_TOKENS = 1024
MESSAGE_BYTES = PROMPT_TOKENS * load_spec(MODEL).hidden_size * 4
_ALL_REDUCE = OP_CODES["all_reduce"]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRanks]:
    """On a node each, joined by the link."""
    with real_ranks(tmp_path_factory.mktemp("2x1"), nodes=Nodes(2, 1, Link(RATE))) as ranks:
        layout = EngineSettings(
            layout=Layout.parse("tp2"), memory_per_rank=2**27, prefix_cache=False, max_num_batched_tokens=PROMPT_TOKENS
        )
        ranks.run(ranks.stand(MODEL, layout))
        ranks.run(ranks.tokens([1, 2, 3], 3))
        yield ranks


def rows_of(ranks: RealRanks, *asked: tuple[list[int], int]) -> NDArray[np.void]:
    """The rows of collectives of these prompts, one after another."""
    ranks.steps()
    ranks.events.clear()
    for prompt, max_tokens in asked:
        ranks.run(ranks.tokens(prompt, max_tokens))
    assert ranks.steps()
    return np.concatenate([event["rows"] for event in ranks.events if event["event"] == "collectives"])


def sums(rows: NDArray[np.void], rank: int, layer: int | None = None) -> NDArray[np.void]:
    """The all-reduces inside the layers, as the rank has them."""
    mine = rows[(rows["op"] == _ALL_REDUCE) & (rows["rank"] == rank) & (rows["layer"] >= 0)]
    return mine if layer is None else mine[mine["layer"] == layer]


def decoded(ranks: RealRanks, delay_s: float, num_tokens: int) -> NDArray[np.void]:
    """Rows of decode steps, while rank 1 comes so late to each sum of LAYER."""
    ranks.pool.send(1, Fault("delay", delay_s, LAYER))
    rows = rows_of(ranks, ([5, 6, 7], num_tokens))
    ranks.pool.send(1, Fault("delay"))
    return rows[rows["phase"] != PREFILL]


def medians_us(rows: NDArray[np.void]) -> tuple[float, float]:
    """Wait and transfer."""
    return float(np.median(rows["wait_ns"])) / 1e3, float(np.median(rows["transfer_ns"])) / 1e3


def ring_of(rows: NDArray[np.void], rank: int, ahead_ns: int) -> bytes:
    """What the rank itself wrote, by a clock so far ahead."""
    mine = rows[rows["rank"] == rank]
    ring = np.zeros(len(mine), RING_DTYPE)
    for name in RING_DTYPE.names or ():
        ring[name] = mine[name]
    ring["enter_ns"] += ahead_ns
    ring["exit_ns"] += ahead_ns
    return ring.tobytes()


def prefills(ranks: RealRanks, count: int) -> NDArray[np.void]:
    rows = rows_of(ranks, *[([first + 1] * PROMPT_TOKENS, 1) for first in range(count)])
    assert set(sums(rows, 0)["bytes"]) == {MESSAGE_BYTES}
    return rows


def test_a_straggler_is_waited_for_and_named_with_its_layer(two: RealRanks) -> None:
    """It sleeps at least as long, and the others' lateness is no layer's in particular."""
    rows = decoded(two, DELAY_S, 20)
    wait_us, _ = medians_us(sums(rows, 0, LAYER))
    assert wait_us >= 0.9 * DELAY_S * 1e6
    assert np.median(sums(rows, 1, LAYER)["wait_ns"]) == 0, "the last to come waits for nobody"
    _, figures = who_is_late(as_frame(rows), ("decode",), [])
    assert (figures["straggler"], figures["layer"]) == (1, LAYER)


def test_a_slow_link_is_transfer_on_both_ranks_and_never_quicker_than_its_rate(two: RealRanks) -> None:
    """The two ends of a bucket let a few packets through at once: a twentieth at most of such a message."""
    rows = prefills(two, 1)
    least_ns = 0.95 * MESSAGE_BYTES * WIRE * 8 / RATE * 1e9
    for rank in (0, 1):
        mine = sums(rows, rank)
        assert len(mine) == 2 * load_spec(MODEL).num_layers and np.median(mine["transfer_ns"]) >= least_ns


def test_the_parts_of_every_step_fill_it(two: RealRanks) -> None:
    """Of real steps, with a straggler and a slow link in them: exact sums, whatever the load."""
    two.pool.send(1, Fault("delay", DELAY_S, LAYER))
    rows_of(two, ([1] * 256, 4), ([2] * 40, 4))
    two.pool.send(1, Fault("delay"))
    steps = two.steps()
    assert {step.num_prefill_seqs > 0 for step in steps} == {True, False}
    assert max(unaccounted_share([step]) for step in steps) <= 0.01
    for event in two.requests():
        span = event["first_end_ns"] - event["received_ns"]
        parts = sum(event[f"{part}_ns"] for part in ("queue", "compute", "wait", "transfer"))
        assert abs(parts - span) <= 0.01 * span


@pytest.mark.slow
def test_five_milliseconds_put_in_are_five_milliseconds_of_wait(two: RealRanks) -> None:
    """Turn about, so that what else the machine does weighs on both alike."""
    turns = [decoded(two, delay_s, 40) for delay_s in (0.0, DELAY_S) * 4]
    before, after = (medians_us(sums(np.concatenate(turns[at::2]), 0, LAYER)) for at in (0, 1))
    print(f"put in {DELAY_S * 1e6:.0f} µs: wait {before[0]:.0f} → {after[0]:.0f} µs, "
          f"transfer {before[1]:.0f} → {after[1]:.0f} µs")  # fmt: skip
    assert after[0] - before[0] == pytest.approx(DELAY_S * 1e6, rel=0.1)
    assert abs(after[1] - before[1]) <= 0.1 * DELAY_S * 1e6, "the link is what it was"


@pytest.mark.slow
def test_the_shortest_call_tells_the_same_where_clocks_are_not_one(two: RealRanks) -> None:
    """The same rows, with one rank's clock ten minutes ahead."""
    rows = decoded(two, DELAY_S, 120)
    both = merge([(rank, 0, 1, ring_of(rows, rank, rank * 600 * 10**9)) for rank in (0, 1)], shared_clock=False)
    wait_us, transfer_us = medians_us(sums(both.rows, 0, LAYER))
    _, shared_us = medians_us(sums(rows, 0, LAYER))
    assert wait_us == pytest.approx(DELAY_S * 1e6, rel=0.1)
    assert abs(transfer_us - shared_us) <= 0.1 * DELAY_S * 1e6


@pytest.mark.slow
def test_a_message_through_the_link_takes_its_bytes_over_its_rate(two: RealRanks) -> None:
    node = next(name for name in of_owner(os.getpid()) if name.endswith("-n0"))
    before = bytes_sent(node)
    rows = prefills(two, 6)
    crossed = (bytes_sent(node) - before) / rows[rows["rank"] == 0]["bytes"].sum()
    assert WIRE < crossed < 1.1, "what was sent is what was given, in segments, and the other way's acknowledgements"
    put_in_us = MESSAGE_BYTES * WIRE * 8 / RATE * 1e6
    for rank in (0, 1):
        wait_us, transfer_us = medians_us(sums(rows, rank))
        print(f"rank {rank}: put in {put_in_us:.0f} µs ({crossed:.3f} bytes sent a byte given): "
              f"transfer {transfer_us:.0f} µs, wait {wait_us:.0f} µs")  # fmt: skip
        assert transfer_us == pytest.approx(put_in_us, rel=0.1)
        assert wait_us < 0.1 * put_in_us
