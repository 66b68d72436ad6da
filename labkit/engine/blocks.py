"""KV memory as numbered blocks: who holds which, and which still hold something that a later prompt begins
with.

A block is in exactly one place: held by requests (counted), free and empty, or free but cached, waiting to
be found again or evicted, oldest first. The prefix cache is a chain: a full block is known by (the node of
the blocks before it, its own token ids), compared whole by the dictionary, so two prefixes whose hashes
collide are still two prefixes. Nodes are never reused: an evicted parent cannot be mistaken for the one
that took its place.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

ROOT = 0
"""The node before the first block."""

PrefixKey = tuple[int, tuple[int, ...]]


class Holder(Protocol):
    id: str

    @property
    def blocks(self) -> Sequence[int]: ...


class IntegrityError(AssertionError):
    """A block is in two places, or in none."""


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens. All calls take constant time a block."""

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"A pool of {num_blocks} blocks of {block_size} tokens holds nothing: give 1 or more of each."
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._num_holders = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[PrefixKey, int] = {}
        self._key_of: list[PrefixKey | None] = [None] * num_blocks
        self._node_of = [ROOT] * num_blocks
        self._last_node = ROOT

    @property
    def num_free(self) -> int:
        """Blocks that an allocation may take, empty or cached."""
        return len(self._empty) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Blocks that a prefix can be found in, held or free."""
        return len(self._block_of)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one holder each. The caller has seen that `num_free` is enough."""
        taken = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for block in taken:
            self._num_holders[block] = 1
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """One holder fewer for each. The tail is freed first, so that a prefix is evicted from its end."""
        for block in reversed(blocks):
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                if self._key_of[block] is None:
                    self._empty.append(block)
                else:
                    self._evictable[block] = None

    def match(self, tokens: Sequence[int], max_blocks: int) -> list[int]:
        """The blocks of the longest known beginning of `tokens`, `max_blocks` at most; not yet held."""
        if not self.prefix_cache:
            return []
        found: list[int] = []
        node, size = ROOT, self.block_size
        for start in range(0, max_blocks * size, size):
            block = self._block_of.get((node, tuple(tokens[start : start + size])))
            if block is None:
                break
            found.append(block)
            node = self._node_of[block]
        return found

    def num_unheld(self, blocks: Sequence[int]) -> int:
        return sum(not self._num_holders[block] for block in blocks)

    def hold(self, blocks: Sequence[int]) -> int:
        """One holder more for each of a match's blocks; returns the node of the last (ROOT for none)."""
        for block in blocks:
            if self._num_holders[block] == 0:
                del self._evictable[block]
            self._num_holders[block] += 1
        return self._node_of[blocks[-1]] if blocks else ROOT

    def publish(self, block: int, parent: int, tokens: tuple[int, ...]) -> int:
        """Make a full, computed block findable behind `parent`; returns the node of what it holds.

        When another block already holds the same, that one stays the known one and its node is returned.
        """
        if not self.prefix_cache:
            return ROOT
        known = self._block_of.setdefault((parent, tokens), block)
        if known == block:
            self._last_node += 1
            self._key_of[block] = (parent, tokens)
            self._node_of[block] = self._last_node
        return self._node_of[known]

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        key = self._key_of[block]
        assert key is not None
        del self._block_of[key]
        self._key_of[block] = None
        return block

    def check_integrity(self, requests: Iterable[Holder]) -> None:
        """Walk everything: each block in one place, each count true, each cached block known by its own key.

        `requests` are all that hold blocks. Raises IntegrityError with the first block that is wrong.
        """
        holders = Counter(block for request in requests for block in request.blocks)
        empty = Counter(self._empty)
        for block in range(self.num_blocks):
            places = (holders[block] > 0) + empty[block] + (block in self._evictable)
            _require(places == 1, f"block {block} is in {places} places instead of one")
            _require(
                self._num_holders[block] == holders[block],
                f"block {block} counts {self._num_holders[block]} holders, {holders[block]} requests have it",
            )
            key = self._key_of[block]
            _require(key is None or self._block_of.get(key) == block, f"block {block} is lost to its key")
            _require(not (key and empty[block]), f"block {block} is cached and empty at once")
            _require(bool(key) or block not in self._evictable, f"block {block} awaits a hit without a key")
        num_keys = sum(key is not None for key in self._key_of)
        known = len(self._block_of)
        _require(num_keys == known, f"{known} prefixes are known and {num_keys} blocks hold one")


def _require(true: bool, sentence: str) -> None:
    if not true:
        raise IntegrityError(sentence)
