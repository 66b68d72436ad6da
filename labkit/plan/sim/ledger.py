"""The engine's ledger over the simulator's pools: the same sums, without the lists that stand behind them there.

`CountedLedger` does in one go what the engine's does a call at a time, for that is what a simulated request's way
through mostly is. The tests hold it to the engine's own over real token ids.
"""

from __future__ import annotations

from array import array
from typing import Any, cast

from labkit.engine.blocks import BlockPool
from labkit.engine.ledger import Kept, Ledger
from labkit.engine.request import Request
from labkit.plan.sim.pool import CountedPool
from labkit.plan.sim.request import Held, Job, Prompt


class SimLedger(Ledger):
    """The engine's. expects: whether anybody asks how long answers will be (a router, or a policy that promises)."""

    expects = True

    def __init__(self, pool: BlockPool, reserving: bool, prefills_only: bool = False) -> None:
        super().__init__(pool, reserving, prefills_only)
        self._size = pool.block_size

    def _expected_tokens(self, request: Request) -> int:
        job = cast(Job, request)
        longest = job.final
        if not self.expects:
            return longest
        answer: int = job.output.count + 1
        if not self.prefills_only:
            answer = max(answer, self.expected_length.of(job.params.max_tokens))
        size = self._size
        whole = -(-(job.num_prompt + answer - 1) // size) * size
        return whole if whole < longest else longest

    def _whole_blocks(self, request: Request, num_tokens: int) -> int:
        longest, whole = cast(Job, request).final, -(-num_tokens // self._size) * self._size
        return whole if whole < longest else longest

    def enter(self, request: Request) -> None:
        request.expected_tokens = expected = self._expected_tokens(request)
        self.load_tokens += expected

    def leave(self, request: Request, answered: bool) -> None:
        super().leave(request, answered and self.expects)


class CountedLedger(SimLedger):
    """Over a CountedPool: publishing is remembering how many blocks are full."""

    pool: CountedPool

    def claim(self, request: Request) -> bool:
        job = cast(Job, request)
        if job.blocks.segment is not None:  # it comes back, and may find what it had
            return super().claim(job)
        expected = self._expected_tokens(job)
        needed = -(-(expected if self.reserving else job.num_prompt + job.output.count) // self._size)
        if needed > self.pool.num_free - self.num_reserved:
            return False
        self.load_tokens += expected - job.expected_tokens
        job.expected_tokens = expected
        job.num_cached = 0
        if self.reserving:
            job.num_reserved = needed
            self.num_reserved += needed
        return True

    def take(self, request: Request, num_tokens: int) -> bool:
        job, pool = cast(Job, request), self.pool
        held, computed = job.blocks, job.num_computed
        end = computed + num_tokens
        missing = -(-end // self._size) - held.count
        if missing > pool.num_free:
            return False
        if computed and not job.in_flight:
            self.publish(job, computed)
        if missing > 0:
            held.count += missing
            pool.lend(missing)
            if job.num_reserved:
                self._keep_promise(job, missing)
        if end > job.expected_tokens:
            self.expect_block(job, end)
        return True

    def publish(self, request: Request, num_computed: int) -> None:
        full = num_computed // self._size
        if full > request.num_published:
            request.num_published = full
        held: Any = request.blocks
        held.full = request.num_published

    def leave(self, request: Request, answered: bool) -> None:
        """It does not come back, so that nobody finds its blocks again."""
        held: Any = request.blocks
        computed = request.num_computed
        self.pool.release_for_good(held.count, max(computed // self._size, request.num_published))
        held.count = 0
        self.num_reserved -= request.num_reserved
        self.load_tokens -= request.expected_tokens - computed
        request.num_reserved = request.num_computed = request.expected_tokens = request.num_published = 0
        if answered and self.expects:
            self.expected_length.observe(cast(Job, request).output.count)

    def keep(self, request: Request) -> Kept:
        kept = super().keep(request)
        request.blocks = cast(Any, Held())
        return kept


class KeyedLedger(SimLedger):
    """Over a KeyedPool."""

    def publish(self, request: Request, num_computed: int) -> None:
        pool, size = self.pool, self.pool.block_size
        prompt = cast(Prompt, request.prompt)
        full = num_computed // size
        node = request.prefix_node
        for number in range(request.num_published, full):
            start = number * size
            node = pool.publish(request.blocks[number], node, prompt.key(start, start + size))
        if full > request.num_published:
            request.num_published, request.prefix_node = full, node

    def keep(self, request: Request) -> Kept:
        kept = super().keep(request)
        request.blocks = array("i")
        return kept
