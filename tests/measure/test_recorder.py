"""Wait and transfer told apart from hand-made rows."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

from labkit.measure.recorder import (
    AXIS_CODES,
    DECODE,
    OP_CODES,
    RING_DTYPE,
    ROW_FORMAT,
    Ring,
    group_id,
    merge,
)

TP = group_id("tp", 0)
_ALL_REDUCE, _TP = OP_CODES["all_reduce"], AXIS_CODES["tp"]


def _ring(calls: list[tuple[int, int, int]], group: int = TP, num_bytes: int = 2048) -> bytes:
    """Rows of (seq, enter, exit)."""
    ring = Ring(64)
    for seq, enter, leave in calls:
        ring.put(group, seq, _ALL_REDUCE, _TP, DECODE, seq // 2 % 1000, num_bytes, enter, leave)
    return ring.drain()


def test_a_packed_row_is_a_numpy_row():
    assert ROW_FORMAT.size == RING_DTYPE.itemsize
    ring = Ring()
    ring.put(group_id("ep", 3), 7, OP_CODES["all_to_all"], AXIS_CODES["ep"], 2, -1, 1 << 40, 123, 456)
    row = np.frombuffer(ring.drain(), RING_DTYPE)[0]
    assert row.tolist() == (5 << 16 | 3, 7, 3, 5, 2, -1, 1 << 40, 123, 456)


def test_the_late_rank_makes_the_others_wait():
    """Rank 0 enters at 100, rank 1 at 160, both leave about 200: 60 of rank 0's call is waiting."""
    merged = merge([(0, 0, 300, _ring([(0, 100, 200)])), (1, 0, 300, _ring([(0, 160, 205)]))])
    assert merged.wait_ns == [60, 0]
    assert merged.transfer_ns == [40, 45]
    assert merged.compute_ns == [100 + 100, 160 + 95]
    assert merged.rows["last_enter_ns"].tolist() == [160, 160]


def test_a_slow_link_is_transfer_on_every_rank():
    merged = merge([(0, 0, 900, _ring([(0, 100, 800)])), (1, 0, 900, _ring([(0, 100, 800)]))])
    assert merged.wait_ns == [0, 0] and merged.transfer_ns == [700, 700]


def test_without_a_shared_clock_the_shortest_call_is_the_transfer():
    offset = 10_000_000
    merged = merge(
        [
            (0, 0, 300, _ring([(0, 100, 200)])),
            (1, offset, offset + 300, _ring([(0, offset + 160, offset + 205)])),
        ],
        shared_clock=False,
    )
    assert merged.transfer_ns == [45, 45] and merged.wait_ns == [55, 0]


def test_parts_of_a_rank_fill_its_step():
    """Compute from its own instants, wait and transfer from theirs: nothing is left over."""
    rng = np.random.default_rng(1)
    pieces, num_calls = [], 17
    enters = np.cumsum(rng.integers(100, 500, (2, num_calls)), axis=1)
    exits = enters.max(axis=0) + 20
    enters += np.arange(num_calls) * 1000
    exits += np.arange(num_calls) * 1000
    for rank in range(2):
        calls = [(i, int(enters[rank, i]), int(exits[i])) for i in range(num_calls)]
        pieces.append((rank, 0, 40_000, _ring(calls)))
    merged = merge(pieces)
    for at in range(2):
        assert merged.compute_ns[at] + merged.wait_ns[at] + merged.transfer_ns[at] == 40_000
    assert merged.num_collectives == num_calls and merged.collective_bytes == num_calls * 2048


def test_groups_are_matched_by_id_and_sequence_not_by_order():
    """Four ranks in two tp groups: a call of one group says nothing about the other's."""
    other = group_id("tp", 1)
    merged = merge(
        [
            (0, 0, 100, _ring([(5, 10, 50)])),
            (1, 0, 100, _ring([(5, 30, 50)])),
            (2, 0, 100, _ring([(5, 90, 95)], group=other)),
            (3, 0, 100, _ring([(5, 90, 96)], group=other)),
        ]
    )
    assert merged.wait_ns == [20, 0, 0, 0] and merged.transfer_ns == [20, 20, 5, 6]
    assert merged.num_collectives == 2


PP = group_id("pp", 0)


def _edge(
    op: str, enter: int, leave: int, num_bytes: int = 4096, seq: int = 1 << 20, axis: str = "pp"
) -> bytes:
    """One row of a send or receive."""
    ring = Ring(8)
    ring.put(group_id(axis, 0), seq, OP_CODES[op], AXIS_CODES[axis], DECODE, -1, num_bytes, enter, leave)
    return ring.drain()


def test_a_receiver_that_is_early_is_idle_and_not_waiting():
    """Stage 1 comes at 20, stage 0 sends at 100, it is there at 130: 80 of bubble, 30 of transfer."""
    merged = merge([(0, 0, 110, _edge("send", 100, 104)), (1, 0, 200, _edge("recv", 20, 130))])
    assert (merged.idle_ns, merged.wait_ns, merged.transfer_ns) == ([0, 80], [0, 0], [4, 30])
    assert merged.compute_ns == [100 + 6, 20 + 70]
    assert (merged.num_collectives, merged.collective_bytes) == (1, 4096)


def test_a_receiver_that_is_early_in_a_ring_waits_and_is_no_bubble():
    sent, received = _edge("send", 100, 104, axis="pcp"), _edge("recv", 20, 130, axis="pcp")
    merged = merge([(0, 0, 110, sent), (1, 0, 200, received)])
    assert (merged.idle_ns, merged.wait_ns, merged.transfer_ns) == ([0, 0], [0, 80], [4, 30])


def test_a_sender_that_is_early_waits_only_as_long_as_its_call_took():
    """It sends at 100 and goes on at 104; stage 1 comes at 150."""
    merged = merge([(0, 0, 300, _edge("send", 100, 104)), (1, 0, 300, _edge("recv", 150, 160))])
    assert (merged.idle_ns, merged.wait_ns, merged.transfer_ns) == ([0, 0], [4, 0], [0, 10])
    assert merged.rows["last_enter_ns"].tolist() == [150, 150]


def test_a_later_wait_for_a_send_is_no_second_entry():
    rows = _edge("send", 100, 104) + _edge("send", 180, 210, num_bytes=0)
    merged = merge([(0, 0, 300, rows), (1, 0, 300, _edge("recv", 20, 205))])
    assert (merged.idle_ns, merged.wait_ns, merged.transfer_ns) == ([0, 80], [0, 0], [4 + 30, 105])
    assert (merged.num_collectives, merged.collective_bytes) == (1, 4096)


def test_an_edge_and_a_collective_of_one_number_are_two_calls():
    both = [_ring([(1 << 20, 10 * rank, 50)], group=PP) for rank in (0, 1)]
    merged = merge([(0, 0, 300, both[0] + _edge("send", 100, 104)), (1, 0, 300, both[1] + _edge("recv", 60, 110))])
    assert merged.num_collectives == 2
    assert (merged.wait_ns, merged.idle_ns) == ([10, 0], [0, 40])


def test_a_receive_whose_sender_left_no_row_is_all_transfer():
    merged = merge([(0, 0, 300, b""), (1, 0, 300, _edge("recv", 60, 110))])
    assert (merged.idle_ns, merged.transfer_ns) == ([0, 0], [0, 50])


def test_a_rank_without_rows_and_a_step_without_any():
    merged = merge([(0, 0, 100, b""), (1, 0, 100, _ring([(0, 10, 30)]))])
    assert merged.compute_ns == [100, 80] and merged.wait_ns == [0, 0] and merged.transfer_ns == [0, 20]
    empty = merge([(0, 5, 105, b"")])
    assert empty.compute_ns == [100] and len(empty.rows) == 0 and empty.num_collectives == 0


def test_overlapping_calls_do_not_make_compute_negative():
    merged = merge([(0, 0, 100, _ring([(0, 10, 60), (1, 40, 80)]))])
    assert merged.compute_ns == [10 + 20]


def test_rows_say_which_step_and_rank():
    merged = merge([(2, 0, 9, _ring([(0, 1, 2)])), (3, 0, 9, _ring([(0, 1, 2)]))], epoch=4, step_id=77)
    assert merged.rows["rank"].tolist() == [2, 3]
    assert set(merged.rows["epoch"]) == {4} and set(merged.rows["step_id"]) == {77}


def test_a_full_ring_keeps_the_newest_and_counts_what_it_lost():
    ring = Ring(4)
    for seq in range(6):
        ring.put(TP, seq, _ALL_REDUCE, _TP, DECODE, 0, 8, seq, seq + 1)
    assert np.frombuffer(ring.drain(), RING_DTYPE)["seq"].tolist() == [2, 3, 4, 5]
    assert ring.num_dropped == 2
    ring.put(TP, 9, _ALL_REDUCE, _TP, DECODE, 0, 8, 1, 2)
    assert np.frombuffer(ring.drain(), RING_DTYPE)["seq"].tolist() == [9]
    assert ring.drain() == b""


@pytest.mark.slow
def test_merging_is_cheap_beside_a_step():
    """Two ranks of 17 rows each: 50 µs here; the bound leaves room for a busy machine."""
    calls = [(i, i * 400_000, i * 400_000 + 10_000) for i in range(17)]
    pieces = [(rank, 0, 7_000_000, _ring(calls)) for rank in range(2)]
    times = []
    for _ in range(300):
        begin = time.perf_counter_ns()
        merge(pieces)
        times.append(time.perf_counter_ns() - begin)
    assert np.percentile(times, 25) < 150_000


@pytest.mark.parametrize(
    "module", ["recorder", "metrics", "window", "quality", "store", "export", "breakdown"]
)
def test_measuring_needs_neither_torch_nor_pandas(module: str):
    code = (
        f"import sys, labkit.measure.{module}; "
        "print([m for m in ('torch', 'pandas', 'pyarrow', 'plotly', 'aiohttp') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
