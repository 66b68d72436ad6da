"""What each request holds of the KV memory, what it was promised, and how much work it still is.

Policy `labkit` promises a request all blocks of its expected length before it is let in; `vllm` promises
nothing and lets it in when all that there is of it (the whole prompt; of one that comes back its answer too)
would find free blocks at that instant, as vLLM does (`scheduler_reserve_full_isl`). A request that outlives its
expectation is expected to last one block more, again and again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from labkit.engine.admission import ExpectedLength
from labkit.engine.blocks import BlockPool, IntegrityError
from labkit.engine.request import Request


@dataclass(slots=True, eq=False)
class Kept:
    """Blocks of a request that goes on in another pool: they live until they have been read."""

    id: str
    blocks: array[int]


class Ledger:
    """prefills_only: a request leaves with its first token, and is expected to hold no more than that."""

    def __init__(self, pool: BlockPool, reserving: bool, prefills_only: bool = False) -> None:
        self.pool, self.reserving, self.prefills_only = pool, reserving, prefills_only
        self.expected_length = ExpectedLength()
        self.num_reserved = 0
        """Blocks promised and not taken yet."""
        self.load_tokens = 0
        """Tokens still to compute for everybody here, as far as answers keep to their expected length."""

    # ---- a request's way through ----------------------------------------------------------------------

    def enter(self, request: Request) -> None:
        request.expected_tokens = 0
        self._expect(request, self._expected_tokens(request))

    def claim(self, request: Request) -> bool:
        """Hold what the prefix cache has of it and promise it the rest; False while there is no room."""
        pool = self.pool
        # The last token is always computed, cached or not: its logits are the answer's first token.
        found = pool.match(request.tokens(0, request.num_tokens), (request.num_tokens - 1) // pool.block_size)
        num_cached, expected = len(found) * pool.block_size, self._expected_tokens(request)
        wanted = expected if self.reserving else request.num_tokens
        needed = pool.blocks_for(wanted) - len(found)
        if needed + pool.num_unheld(found) > pool.num_free - self.num_reserved:
            return False
        request.prefix_node = pool.hold(found)
        request.blocks.extend(found)
        request.num_published = len(found)
        request.num_cached = num_cached
        self._expect(request, expected)
        self.advance(request, num_cached)
        request.num_reserved = needed if self.reserving else 0
        self.num_reserved += request.num_reserved
        return True

    def claim_arriving(self, request: Request) -> bool:
        """Blocks for the KV that comes from another pool, beyond what is cached here; False: no room yet.

        `num_computed` then counts what was found; the rest is `arriving`'s.
        """
        num_cached = request.num_cached  # what the pool that computed it found: the figure that the user is told
        if not self.claim(request):
            return False
        found, request.num_cached = request.num_computed, num_cached
        self.take(request, request.arriving - found)
        return True

    def keep(self, request: Request) -> Kept:
        """The request leaves for another pool with the number of tokens that it computed here (`arriving`)."""
        self.publish(request, request.num_computed)
        kept, request.blocks = Kept(request.id, request.blocks), array("i")
        request.arriving = request.num_computed
        self._forget(request)
        self._expect(request, 0)
        return kept

    def take(self, request: Request, num_tokens: int) -> bool:
        """Blocks for `num_tokens` more; False when too few are free."""
        pool, end = self.pool, request.num_computed + num_tokens
        missing = pool.blocks_for(end) - len(request.blocks)
        if missing > pool.num_free:
            return False
        if not request.in_flight:
            self.publish(request, request.num_computed)
        if missing > 0:
            request.blocks.extend(pool.allocate(missing))
            self._keep_promise(request, missing)
        if end > request.expected_tokens:
            self._expect(request, self._whole_blocks(request, end))
        return True

    def advance(self, request: Request, num_tokens: int) -> None:
        request.num_computed += num_tokens
        self.load_tokens -= num_tokens

    def publish(self, request: Request, num_computed: int) -> None:
        """Let the prefix cache know the full blocks among the first `num_computed` tokens."""
        size = self.pool.block_size
        while (start := request.num_published * size) + size <= num_computed:
            block = request.blocks[request.num_published]
            tokens = request.tokens(start, start + size)
            request.prefix_node = self.pool.publish(block, request.prefix_node, tokens)
            request.num_published += 1

    def release(self, request: Request) -> None:
        """Take everything back; what was computed stays findable until its blocks are needed."""
        self.publish(request, request.num_computed)
        self.pool.release(request.blocks)
        del request.blocks[:]
        self._forget(request)

    def _forget(self, request: Request) -> None:
        """Nothing of it is here any more."""
        self._keep_promise(request, request.num_reserved)
        self.advance(request, -request.num_computed)
        request.num_published = request.prefix_node = 0

    def leave(self, request: Request, answered: bool) -> None:
        self.release(request)
        self._expect(request, 0)
        if answered:
            self.expected_length.observe(len(request.output))

    # ---- what is to come ------------------------------------------------------------------------------

    def _expected_tokens(self, request: Request) -> int:
        """KV tokens at its end: the answer's last token is never read back."""
        answer = len(request.output) + 1
        if not self.prefills_only:
            answer = max(self.expected_length.of(request.params.max_tokens), answer)
        return self._whole_blocks(request, len(request.prompt) + answer - 1)

    def _whole_blocks(self, request: Request, num_tokens: int) -> int:
        longest = len(request.prompt) + request.params.max_tokens - 1
        return min(longest, self.pool.blocks_for(num_tokens) * self.pool.block_size)

    def _expect(self, request: Request, num_tokens: int) -> None:
        self.load_tokens += num_tokens - request.expected_tokens
        request.expected_tokens = num_tokens

    def _keep_promise(self, request: Request, num_blocks: int) -> None:
        kept = min(num_blocks, request.num_reserved)
        request.num_reserved -= kept
        self.num_reserved -= kept

    def check_integrity(self, requests: Iterable[Request], kept: Iterable[Kept] = ()) -> None:
        """Every block in one place, every sum true. For tests: it walks everything."""
        live = list(requests)
        self.pool.check_integrity([*live, *kept])
        load = sum(request.expected_tokens - request.num_computed for request in live)
        if any(request.num_computed > request.expected_tokens for request in live):
            raise IntegrityError("a request has computed more than was expected of it")
        reserved = sum(request.num_reserved for request in live)
        if (load, reserved) != (self.load_tokens, self.num_reserved):
            raise IntegrityError(
                f"load {self.load_tokens} and reserve {self.num_reserved} should be {load} and {reserved}"
            )
