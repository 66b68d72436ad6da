"""The block pool: each page in one place, prefixes found whole or not at all, the oldest evicted first."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.engine.blocks import ROOT, BlockPool, IntegrityError


def holder(blocks: list[int]) -> SimpleNamespace:
    return SimpleNamespace(id="a", blocks=blocks)


def fill(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Allocate and publish as many full blocks as `tokens` have."""
    size, node = pool.block_size, ROOT
    blocks = pool.allocate(len(tokens) // size)
    for i, block in enumerate(blocks):
        node = pool.publish(block, node, tuple(tokens[i * size : (i + 1) * size]))
    return blocks


def test_a_freed_prefix_is_found_again_and_only_as_far_as_it_agrees() -> None:
    pool = BlockPool(8, 2)
    blocks = fill(pool, [1, 2, 3, 4, 5, 6])
    pool.release(blocks)
    assert pool.num_free == 8
    assert pool.match([1, 2, 3, 4, 9, 9], 3) == blocks[:2]
    assert pool.match([1, 2, 3, 4, 5, 6], 2) == blocks[:2]
    assert pool.match([9, 2, 3, 4, 5, 6], 3) == []


def test_the_same_tokens_behind_another_prefix_are_no_hit() -> None:
    pool = BlockPool(8, 2)
    pool.release(fill(pool, [1, 2, 7, 7]))
    assert pool.match([3, 4, 7, 7], 2) == []
    assert pool.match([7, 7], 1) == []


def test_token_ids_whose_hashes_collide_are_told_apart() -> None:
    low, high = 5, 5 + 2**61 - 1
    assert hash((ROOT, (low, 1))) == hash((ROOT, (high, 1)))
    pool = BlockPool(4, 2)
    fill(pool, [low, 1])
    assert pool.match([high, 1], 1) == []
    other = fill(pool, [high, 1])
    assert pool.match([high, 1], 1) == other


def test_a_child_of_an_evicted_prefix_is_not_found_behind_the_one_that_replaced_it() -> None:
    pool = BlockPool(4, 1)
    parent, child = fill(pool, [1, 2])
    pool.release([parent])  # the child is still held
    others = pool.allocate(3)  # evicts the parent
    assert pool.match([1, 2], 2) == []
    pool.release(others)
    replaced = fill(pool, [1])
    assert pool.match([1, 2], 2) == replaced
    pool.release([child])
    pool.check_integrity([holder(replaced)])


def test_the_end_of_the_longest_unused_prefix_is_evicted_first() -> None:
    pool = BlockPool(6, 1)
    old, new = fill(pool, [1, 2, 3]), fill(pool, [4, 5, 6])
    pool.release(old)
    pool.release(new)
    pool.allocate(2)
    assert pool.match([1, 2, 3], 3) == old[:1]
    assert pool.match([4, 5, 6], 3) == new


def test_a_hit_saves_a_prefix_from_eviction() -> None:
    pool = BlockPool(4, 1)
    first, second = fill(pool, [1]), fill(pool, [2])
    pool.release(first)
    pool.release(second)
    pool.hold(pool.match([1], 1))
    pool.release(first)  # now the latest used
    pool.allocate(3)
    assert pool.match([1], 1) == first
    assert pool.match([2], 1) == []


def test_a_shared_block_is_free_only_after_its_last_holder() -> None:
    pool = BlockPool(4, 1)
    blocks = fill(pool, [1, 2])
    assert pool.hold(pool.match([1, 2], 2)) > 0
    pool.release(blocks)
    assert pool.num_free == 2
    pool.check_integrity([holder(blocks)])
    pool.release(blocks)
    assert pool.num_free == 4
    pool.check_integrity([])


def test_two_blocks_with_the_same_content_keep_one_name() -> None:
    pool = BlockPool(4, 1)
    (a,) = fill(pool, [1])
    (b,) = pool.allocate(1)
    assert pool.publish(b, ROOT, (1,)) == pool.hold(pool.match([1], 1))
    assert pool.match([1], 1) == [a]
    pool.release([b])
    pool.check_integrity([holder([a]), holder([a])])


def test_without_the_prefix_cache_nothing_is_found() -> None:
    pool = BlockPool(4, 1, prefix_cache=False)
    pool.release(fill(pool, [1, 2]))
    assert pool.match([1, 2], 2) == []
    assert pool.num_cached == 0


@pytest.mark.parametrize(
    ("breakage", "sentence"),
    [
        (lambda pool: pool._empty.append(pool._empty[0]), "places"),
        (lambda pool: pool._empty.pop(), "0 places"),
        (lambda pool: pool._num_holders.__setitem__(0, 2), "counts 2 holders"),
        (lambda pool: pool._block_of.clear(), "lost to its key"),
        (lambda pool: pool._block_of.__setitem__((99, (1,)), 0), "prefixes are known"),
    ],
)
def test_the_integrity_check_sees_what_is_wrong(breakage, sentence: str) -> None:
    pool = BlockPool(4, 1)
    blocks = fill(pool, [1])
    pool.check_integrity([holder(blocks)])
    breakage(pool)
    with pytest.raises(IntegrityError, match=sentence):
        pool.check_integrity([holder(blocks)])


def test_a_pool_of_nothing_is_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match="0 blocks of 16 tokens holds nothing"):
        BlockPool(0, 16)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "drop"]), st.integers(0, 3), st.integers(1, 6)), max_size=40))
def test_whatever_happens_each_page_is_in_one_place_and_hits_hold_what_they_promise(events) -> None:
    pool = BlockPool(12, 2)
    content: dict[int, tuple[int, ...]] = {}
    live: list[SimpleNamespace] = []
    for kind, family, length in events:
        if kind == "drop" and live:
            pool.release(live.pop(family % len(live)).blocks)
        elif kind == "add":
            tokens = [family] * 2 + list(range(length * 2 - 2))
            found = pool.match(tokens, length)
            for i, block in enumerate(found):
                assert content[block] == tuple(tokens[: 2 * (i + 1)])
            missing = length - len(found)
            if missing + pool.num_unheld(found) <= pool.num_free:
                node = pool.hold(found)
                blocks = found + pool.allocate(missing)
                for i in range(len(found), length):
                    node = pool.publish(blocks[i], node, tuple(tokens[2 * i : 2 * i + 2]))
                    content[blocks[i]] = tuple(tokens[: 2 * i + 2])
                live.append(holder(blocks))
        pool.check_integrity(live)
