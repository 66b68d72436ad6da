"""The way of a step through its stages, against sums done by hand: nothing is counted twice, nothing is lost."""

from __future__ import annotations

import random

from labkit.measure.path import path_of
from labkit.measure.recorder import AXIS_CODES, MIXED, OP_CODES, MergedStep, Ring, group_id, merge

PP, TP = group_id("pp", 0), group_id("tp", 0)


class Stage:
    """One rank's rows in the making."""

    def __init__(self, rank: int, start: int, end: int) -> None:
        self.rank, self.start, self.end, self.ring = rank, start, end, Ring(64)

    def call(self, enter: int, leave: int, seq: int) -> Stage:
        self.ring.put(TP, seq, OP_CODES["all_reduce"], AXIS_CODES["tp"], MIXED, 0, 64, enter, leave)
        return self

    def cross(self, op: str, edge: int, enter: int, leave: int) -> Stage:
        self.ring.put(PP, edge << 20, OP_CODES[op], AXIS_CODES["pp"], MIXED, -1, 512, enter, leave)
        return self

    def piece(self) -> tuple[int, int, int, bytes]:
        return self.rank, self.start, self.end, self.ring.drain()


def merged(*stages: Stage) -> MergedStep:
    return merge([stage.piece() for stage in stages])


def test_a_waiting_stage_lives_what_the_stage_before_does():
    """Stage 0 computes 0..40, calls 40..60 (its tp neighbour comes at 50), computes to 90 and sends; stage 1
    waits from 5, has it at 97, and calls 120..130.
    """
    first, beside = Stage(0, 0, 95).call(40, 60, 0).cross("send", 1, 90, 93), Stage(1, 0, 95).call(50, 60, 0)
    last = Stage(2, 3, 150).cross("recv", 1, 5, 97).call(120, 130, 9)
    path = path_of(merged(first, beside, last), (0, 2))
    assert path is not None and (path.start_ns, path.end_ns) == (0, 150)
    compute, wait, transfer, queue = path.since(0)
    assert (compute, wait, transfer, queue) == (40 + 30 + 23 + 20, 10 + 0, 10 + 7 + 10, 0)


def test_hidden_states_that_lie_while_the_next_stage_is_busy_are_queue():
    path = path_of(
        merged(Stage(0, 0, 52).cross("send", 1, 50, 52), Stage(1, 80, 200).cross("recv", 1, 85, 90)), (0, 1)
    )
    assert path is not None
    assert path.since(0) == (50 + 110, 0, 5, 35)


def test_what_a_chunk_shares_with_the_one_ahead_of_it_counts_once():
    path = path_of(
        merged(Stage(0, 0, 52).cross("send", 1, 50, 52), Stage(1, 80, 200).cross("recv", 1, 85, 90)), (0, 1)
    )
    assert path is not None
    assert path.since(80) == (110, 0, 5, 5)
    assert path.since(500) == (0, 0, 0, 0)


def test_a_hand_over_without_its_rows_has_no_path():
    assert path_of(merged(Stage(0, 0, 50), Stage(1, 0, 90).cross("recv", 1, 2, 55)), (0, 1)) is None


def test_the_four_kinds_fill_the_time_from_the_first_stage_to_the_last():
    draw = random.Random(7)
    for _ in range(50):
        stages, at, num_stages = [], draw.randrange(100), draw.randrange(2, 5)
        for rank in range(num_stages):
            stage = Stage(rank, at, 0)
            if rank:
                enter = at + draw.randrange(-40, 40)
                at = max(at, enter) + draw.randrange(1, 9)
                stage.cross("recv", rank, enter, at)
            for seq in range(draw.randrange(4)):
                enter = at + draw.randrange(1, 30)
                at = enter + draw.randrange(1, 20)
                stage.call(enter, at, 100 * rank + seq)
            at += draw.randrange(1, 30)
            if rank < num_stages - 1:
                stage.cross("send", rank + 1, at, at + 2)
            stage.end = at + 5
            stages.append(stage)
        start, end = stages[0].start, stages[-1].end
        path = path_of(merged(*stages), range(num_stages))
        assert path is not None
        for since in (0, start + 7, (start + end) // 2):
            assert sum(path.since(since)) == end - max(start, since)
