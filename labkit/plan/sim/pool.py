"""KV memory for the simulator: the engine's pool with keys instead of tokens, and one that only counts.

Where prompts share nothing, nobody finds another's blocks, and which block is which no longer matters: free blocks are
a number, and cached ones are runs of them, oldest first, each the beginning of one request. Only that request can find
it again, after it was preempted. Both pools free and evict exactly what the engine's would.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol, cast

from labkit.engine.blocks import ROOT, BlockPool
from labkit.plan.sim.request import Held, Job, Prompt


class SimPool(Protocol):
    """What the simulator asks of a pool beyond the engine's: blocks first, and who got them later."""

    def lend(self, count: int) -> None:
        """Take `count` blocks for requests that decode."""

    def give(self, job: Job, count: int) -> None:
        """`count` of the blocks lent are this request's."""


class KeyedPool(BlockPool):
    """The engine's pool; a prompt (or a request) says what its blocks hold."""

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool = True) -> None:
        super().__init__(num_blocks, block_size, prefix_cache)
        self._lent: list[int] = []

    def match(self, tokens: Any, max_blocks: int) -> list[int]:
        came_back = isinstance(tokens, Job) and tokens.num_preemptions > 0
        prompt: Prompt = cast(Any, tokens.prompt) if isinstance(tokens, Job) else tokens
        if not self.prefix_cache or not (prompt.block_ids or came_back):
            return []
        found: list[int] = []
        node, size = ROOT, self.block_size
        for start in range(0, max_blocks * size, size):
            block = self._block_of.get((node, prompt.key(start, start + size)))
            if block is None:
                break
            found.append(block)
            node = self._node_of[block]
        return found

    def lend(self, count: int) -> None:
        self._lent += self.allocate(count)

    def give(self, job: Job, count: int) -> None:
        if count:
            job.blocks.extend(self._lent[-count:])
            del self._lent[-count:]


class _Found(Sequence[int]):
    """The first blocks of a request that came back, still cached."""

    def __init__(self, segment: list[Any], count: int) -> None:
        self.segment, self.num = segment, count

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: Any) -> Any:
        return range(self.num)[index]


class CountedPool(BlockPool):
    """Numbers alone. A segment is [blocks still cached] of one request that may come back, or of any number of others
    behind each other, whom nobody finds again; those in front are evicted first."""

    num_free = 0  # a plain number here: it is read several times a step

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool = True) -> None:
        self.num_blocks, self.block_size, self.prefix_cache = num_blocks, block_size, prefix_cache
        self._num_empty = num_blocks
        self.num_free = num_blocks
        self._segments: deque[list[Any]] = deque()
        self._nobodys: list[Any] = [0]
        """The segment of those that do not come back, which grows while it is the youngest."""

    @property
    def num_cached(self) -> int:
        return self.num_free - self._num_empty

    def allocate(self, count: int) -> Any:
        self.lend(count)
        return range(count)

    def lend(self, count: int) -> None:
        self.num_free -= count
        if count <= self._num_empty:
            self._num_empty -= count
            return
        count -= self._num_empty
        self._num_empty = 0
        segments = self._segments
        while count:
            segment = segments[0]
            if segment[0] > count:
                segment[0] -= count
                return
            count -= segment[0]
            segment[0] = 0
            segments.popleft()

    def release(self, blocks: Any) -> None:
        held: Held = blocks
        count, full = held.count, held.full if self.prefix_cache else 0
        self.num_free += count
        self._num_empty += count - full
        if full:
            held.segment = segment = [full]
            self._segments.append(segment)

    def release_for_good(self, count: int, full: int) -> None:
        """`count` blocks, `full` of them cached, of a request that does not come back."""
        self.num_free += count
        if not self.prefix_cache:
            full = 0
        self._num_empty += count - full
        if full:
            segments, last = self._segments, self._nobodys
            if segments and segments[-1] is last:
                last[0] += full
            else:
                self._nobodys = [full]
                segments.append(self._nobodys)

    def match(self, tokens: Any, max_blocks: int) -> Any:
        segment = None if type(tokens) is range else tokens.blocks.segment
        if segment is None or not segment[0]:
            return ()
        return _Found(segment, min(segment[0], max_blocks))

    def num_unheld(self, blocks: Sequence[int]) -> int:
        return len(blocks)

    def hold(self, blocks: Any) -> int:
        if blocks:
            blocks.segment[0] -= blocks.num
            self.num_free -= blocks.num
        return ROOT

    def give(self, job: Job, count: int) -> None:
        held: Any = job.blocks
        held.count += count
