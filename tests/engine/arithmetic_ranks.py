"""Ranks that compute with integers: a KV cache of real pages, and a next token that depends on all that is
read there.

A token's page slot keeps (token, position); the next token is a checksum over the whole context as the
block table shows it. A wrong page, a page freed too early, a token written twice or not at all: each
changes the answer.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace

from labkit.cluster.blame import hung
from labkit.engine import messages
from labkit.engine.messages import (
    AllocateKV,
    Configure,
    Configured,
    Hello,
    Memory,
    Moved,
    MoveKV,
    Ready,
    Sampled,
    Step,
    StepStats,
)
from labkit.layout import Deployment, Layout

VOCAB = 997


def next_token(context: Iterable[int]) -> int:
    checksum = 7
    for position, token in enumerate(context):
        checksum = (checksum * 31 + (token + 1) * (position + 3)) % 1_000_003
    return checksum % VOCAB


def answer_to(prompt: Sequence[int], num_tokens: int, stop_ids: frozenset[int] = frozenset()) -> list[int]:
    """What a request must get, whatever happened to it on the way."""
    context, answer = list(prompt), []
    while len(answer) < num_tokens:
        answer.append(next_token(context))
        context.append(answer[-1])
        if answer[-1] in stop_ids:
            break
    return answer


class Pages:
    """One replica's KV memory."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)

    def run(self, step: Step) -> list[int]:
        """Writes every new token, then reads each sampled sequence whole. Returns the sampled tokens."""
        token_ids, tables = _ints(step.token_ids), _ints(step.block_tables)
        query_lens, context_lens = _ints(step.query_lens), _ints(step.context_lens)
        views, token_at, block_at = [], 0, 0
        for query, context in zip(query_lens, context_lens, strict=True):
            num_blocks = -(-(query + context) // self.block_size)
            table = tables[block_at : block_at + num_blocks]
            for i in range(query):
                self.slots[self._slot(table, context + i)] = (token_ids[token_at + i], context + i)
            views.append((table, query + context))
            token_at, block_at = token_at + query, block_at + num_blocks
        assert (token_at, block_at) == (len(token_ids), len(tables)), "the message's parts do not match"
        assert all(query == 1 for query in query_lens[step.num_prefill_seqs :])
        return [next_token(self._read(*views[spec.index])) for spec in step.sample]

    def _slot(self, table: Sequence[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def _read(self, table: Sequence[int], num_tokens: int) -> list[int]:
        tokens = []
        for position in range(num_tokens):
            held = self.slots[self._slot(table, position)]
            assert held is not None and held[1] == position, f"position {position} reads {held}"
            tokens.append(held[0])
        return tokens


def _ints(data: bytes) -> array[int]:
    return array("i", data)


class ArithmeticPool:
    """Speaks as `labkit.cluster.pool.Pool` does, in encoded messages, for ranks inside this process."""

    def __init__(self, num_ranks: int, num_blocks: int = 64, step_s: float = 0.0) -> None:
        self.config = SimpleNamespace(num_ranks=num_ranks, threads=1, device="cpu")
        self.num_blocks: Callable[[Configure, int], int] = lambda configure, rank: num_blocks
        self.step_s = step_s
        self.state, self.hellos, self.restarts_left = "stopped", {}, 3
        self.clocks: list[object] = []
        self.on_message: Callable[[int, object], None] = lambda rank, message: None
        self.on_failure: Callable[[object], None] = lambda failure: None
        self.configures: list[Configure] = []
        self.log: list[tuple[str, int]] = []
        """What passed, in order: ("step", rank) for each plan sent, ("token", rank) for each answer."""
        self.experts = b""
        """What each rank's experts claim to have done in every step (`labkit.measure.experts`)."""
        self.silent: set[int] = set()
        """Ranks that hang: they take everything and answer nothing."""
        self.move_s = 0.0
        """How long KV is on its way from one replica to another."""
        self._configure: Configure | None = None
        self._of_rank: dict[int, Configure] = {}
        self._pages: dict[int, Pages] = {}

    async def start(self) -> None:
        self.state = "ready"
        self.hellos = {
            rank: Hello("", rank, 0, "here", False, "cpu") for rank in range(self.config.num_ranks)
        }

    async def restart(self) -> None:
        self.restarts_left -= 1
        await asyncio.sleep(0)
        await self.start()

    async def stop(self) -> None:
        self.state = "stopped"

    def die(self, rank: int) -> None:
        self.state = "failed"
        self.on_failure(
            SimpleNamespace(
                rank=rank, kind="raised", error=f"rank {rank} raised ValueError: no", traceback="Traceback …"
            )
        )

    def declare_hung(self, ranks: Sequence[int], what: str, timeout_s: float) -> None:
        self.state = "failed"
        self.silent.clear()
        self.on_failure(hung(ranks, what, timeout_s))

    def send(self, rank: int, message: object) -> None:
        self.send_many((rank,), message)

    def send_many(self, ranks: Iterable[int], message: object) -> None:
        if self.state == "ready":
            data = messages.encode(message)
            for rank in set(ranks) - self.silent:
                self._receive(rank, messages.decode_engine_message(data))

    def _receive(self, rank: int, message: object) -> None:
        if isinstance(message, Configure):
            self._configured(rank, message)
        elif isinstance(message, AllocateKV):
            assert self._configure is not None
            self._pages[rank] = Pages(message.num_blocks, self._configure.block_size)
            self._answer(rank, Ready(message.epoch, rank, Memory(10, 20, 0, 30), 0.03))
        elif isinstance(message, MoveKV):
            self.log.append(("move", rank))
            asyncio.get_running_loop().call_later(self.move_s, self._move, rank, message)
        elif isinstance(message, Step):
            self.log.append(("step", rank))
            asyncio.get_running_loop().call_later(self.step_s, self._step, rank, message)

    def _configured(self, rank: int, message: Configure) -> None:
        self.configures.append(message)
        self._configure = self._of_rank[rank] = message
        num_blocks = self.num_blocks(message, rank)
        error = f"rank {rank} is too small for {message.layout}." if num_blocks < 0 else ""
        self._answer(
            rank, Configured(message.epoch, rank, num_blocks, 64, Memory(10, 0, 0, 50), 0.01, 0.02, error)
        )

    def _step(self, rank: int, step: Step) -> None:
        assert self._configure is not None
        if self.state != "ready" or step.epoch != self._configure.epoch:
            return
        layout, end_ns = Layout.parse(self._of_rank[rank].layout), time.monotonic_ns()
        local = rank - self._of_rank[rank].first_rank
        start_ns = end_ns - 1000
        token_ids = self._pages[rank].run(step)
        if local == layout.sampling_rank(layout.replica_of(local)):
            self.log.append(("token", rank))
            logprobs = [(-0.5, [(token, -0.5)]) for token in token_ids]
            self._answer(rank, Sampled(step.epoch, step.step_id, token_ids, logprobs, start_ns, end_ns))
        self._answer(rank, StepStats(step.epoch, step.step_id, rank, start_ns, end_ns, b"", self.experts))

    def _move(self, rank: int, move: MoveKV) -> None:
        """A taking rank reads what the giving replica has now: blocks that were freed too early are seen."""
        if self.state != "ready" or self._configure is None or move.epoch != self._configure.epoch:
            return
        pools = Deployment.parse(self._configure.deployment).pools
        source, target = pools[move.source[0]], pools[move.target[0]]
        sent = 0
        if rank in target.replicas[move.target[1]]:
            given, taken = self._pages[source.replicas[move.source[1]][0]], self._pages[rank]
            tables = _ints(move.source_blocks), _ints(move.target_blocks)
            for position in range(move.start, move.stop):
                taken.slots[taken._slot(tables[1], position)] = given.slots[given._slot(tables[0], position)]
        else:
            sent = 4 * (move.stop - move.start)
        now_ns = time.monotonic_ns()
        self._answer(rank, Moved(move.epoch, move.move_id, rank, sent, now_ns - 1000, now_ns))

    def _answer(self, rank: int, message: object) -> None:
        decoded = messages.decode_rank_message(messages.encode(message))
        asyncio.get_running_loop().call_soon(self.on_message, rank, decoded)
