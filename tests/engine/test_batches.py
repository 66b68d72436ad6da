"""A step's arrays become positions, slots and groups of decodes that waste little on padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from thread_ranks import make_step

from labkit.engine.batches import GROUP_COST_BLOCKS, Shape, alike, build, windows_of
from labkit.engine.messages import SampleSpec

SHAPE = Shape(4, 99, (None,), torch.float32, torch.device("cpu"))


def test_positions_and_slots_follow_context_and_block_table() -> None:
    step = make_step([([7, 8, 9], 3, [5, 2]), ([1], 4, [0, 6])], [SampleSpec(0), SampleSpec(1)], 1)
    batch = build(step, SHAPE)
    assert batch.positions.tolist() == [3, 4, 5, 4]
    assert batch.slots.tolist() == [5 * 4 + 3, 2 * 4, 2 * 4 + 1, 6 * 4]
    assert batch.logit_rows is not None and batch.logit_rows.tolist() == [2, 3]
    assert (batch.chunks[0].start, batch.chunks[0].stop, batch.chunks[0].context) == (0, 3, 3)
    assert batch.decodes[0].masks[None].flatten().isfinite().tolist() == [True] * 5 + [False] * 3


def test_a_step_whose_rows_are_all_sampled_needs_no_selection() -> None:
    step = make_step([([1], 4, [0, 6]), ([2], 0, [1])], [SampleSpec(0), SampleSpec(1)], 0)
    assert build(step, SHAPE).logit_rows is None
    step.sample.reverse()
    step.sample[0].index, step.sample[1].index = 1, 0
    rows = build(step, SHAPE).logit_rows
    assert rows is not None and rows.tolist() == [1, 0], "tokens come in the order of the specs"


@pytest.mark.parametrize("seed", range(20))
def test_groups_hold_every_decode_once_and_cost_no_more_than_one_rectangle(seed: int) -> None:
    rng = np.random.default_rng(seed)
    widths = rng.choice([1, 2, 10, 12, 200, 256], size=rng.integers(1, 40)).astype(np.int64)
    groups = alike(widths)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(widths)))
    read = sum(len(g) * widths[g].max() + GROUP_COST_BLOCKS for g in groups)
    assert read <= len(widths) * widths.max() + GROUP_COST_BLOCKS


def test_one_long_sequence_does_not_make_the_short_ones_long() -> None:
    assert [group.tolist() for group in alike(np.array([10, 300, 11, 9]))] == [[3, 0, 2], [1]]
    assert len(alike(np.array([10, 11, 12, 10]))) == 1


def test_blocks_of_decodes_in_groups_are_their_own() -> None:
    step = make_step([([1], 4 * 30, list(range(31))), ([2], 2, [40]), ([3], 1, [41])], [], 0)
    groups = build(step, SHAPE).decodes
    assert [g.rows.tolist() for g in groups if g.rows is not None] == [[1, 2], [0]]
    assert [g.blocks.tolist() for g in groups] == [[40, 41], list(range(31))]


def test_windows_are_kept_once_each() -> None:
    assert windows_of([None, 8, None, 8]) == (None, 8)
