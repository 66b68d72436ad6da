"""Requests on their way from the pool that prefilled them to the pool that decodes them.

The decode pool admits first: only when a request has its blocks there does its KV begin to move. What it held in the
prefill pool lives until the move is over, also when whoever asked has gone away meanwhile; what it got in the decode
pool likewise. No tensor is here: the ranks know from the layouts who gives what to whom.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from labkit.engine.messages import Moved, MoveKV
from labkit.engine.replica import Replica
from labkit.engine.request import Request
from labkit.engine.stream import TokenLogprobs


@dataclass(eq=False)
class Handoff:
    request: Request
    source: Replica
    target: Replica
    left_ns: int
    """The prefill pool had sampled its token."""
    withheld: tuple[int, TokenLogprobs | None] | None = None
    """That token, where the user gets it only with the KV."""
    start_ns: int = 0
    """The ranks were told to move; 0: it waits for blocks."""
    num_tokens: int = 0
    answers: dict[int, Moved] = field(default_factory=dict)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.source.ranks + self.target.ranks

    @property
    def silent_ranks(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.answers]

    @property
    def sent_bytes(self) -> int:
        return sum(answer.sent_bytes for answer in self.answers.values())


class Handoffs:
    """All of them: waiting for blocks, by request; on the move, by the number of the move."""

    def __init__(self, send: Callable[[Sequence[int], MoveKV], None]) -> None:
        self._send = send
        self.waiting: dict[str, Handoff] = {}
        self.moving: dict[int, Handoff] = {}
        self._ids = count(1)

    def open(self, request: Request, source: Replica, target: Replica, now_ns: int) -> Handoff:
        """The request has been prefilled; it queues in the target's scheduler."""
        handoff = self.waiting[request.id] = Handoff(request, source, target, now_ns)
        return handoff

    def start(self, replica: Replica, epoch: int) -> bool:
        """Move the KV of those that the replica's scheduler has admitted; whether there were any."""
        admitted, replica.scheduler.admitted = replica.scheduler.admitted, []
        for request in admitted:
            self._move(self.waiting.pop(request.id), epoch)
        return bool(admitted)

    def _move(self, handoff: Handoff, epoch: int) -> None:
        request, kept = handoff.request, handoff.source.scheduler.kept[handoff.request.id]
        move_id, handoff.start_ns = next(self._ids), time.monotonic_ns()
        handoff.num_tokens = request.arriving - request.num_computed
        self.moving[move_id] = handoff
        source, target = handoff.source, handoff.target
        message = MoveKV(
            epoch, move_id, (source.pool, source.index_in_pool), (target.pool, target.index_in_pool),
            request.num_computed, request.arriving, _table(kept.blocks), _table(request.blocks),
        )  # fmt: skip
        self._send(handoff.ranks, message)

    def moved(self, message: Moved) -> Handoff | None:
        """A rank's part is over; the handoff when it was the last one."""
        handoff = self.moving.get(message.move_id)
        if handoff is None:
            return None
        handoff.answers[message.rank] = message
        if handoff.silent_ranks:
            return None
        del self.moving[message.move_id]
        return handoff

    def withdraw(self, request_id: str) -> Replica | None:
        """The request has ended. What has not begun to move never will; what moves goes on to its end.

        Returns the replica that has blocks back by that.
        """
        handoff = self.waiting.pop(request_id, None)
        if handoff is None:
            return None
        handoff.source.scheduler.let_go(request_id)
        return handoff.source

    def end_all(self) -> Iterator[Handoff]:
        """The layout goes: those that wait are computed again elsewhere. Nothing is on the move."""
        while self.waiting:
            yield self.waiting.popitem()[1]

    def clear(self) -> None:
        """The ranks are gone."""
        self.waiting.clear()
        self.moving.clear()


def _table(blocks: array[int]) -> bytes:
    return array("i", blocks).tobytes()
