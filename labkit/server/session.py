"""Who holds the ranks, and who comes next: one holder, a queue in order of arrival, and nobody measured unknowingly.

A lease is a living connection: its end is the holder's end. What other people ask of the engine meanwhile is served,
and counted against the run, so that its figures can say that they were not alone. A quick switch from a shell holds
the ranks for as long as the switch takes, and is refused while somebody else holds them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any


class RanksHeld(Exception):
    """Somebody else holds the ranks; the message names them (HTTP 409)."""


class Ticket:
    """One claim on the ranks: waiting, then holding, then released."""

    def __init__(self, client: str, purpose: str, run_id: str = "", expected_s: float = 0.0) -> None:
        self.client = client
        self.purpose = purpose
        self.run_id = run_id
        self.expected_s = expected_s
        self.foreign_requests = 0
        """Requests of others that the engine served while this ticket held the ranks."""
        self.released = asyncio.Event()
        """Set when the holder asked to give the ranks back."""
        self._moved = asyncio.Event()
        self._since_s = time.monotonic()

    def start(self) -> None:
        self._since_s = time.monotonic()
        self.wake()

    def wake(self) -> None:
        self._moved.set()

    async def moved(self, timeout_s: float) -> bool:
        """Wait until the place in the queue changes, at most `timeout_s`; whether it did."""
        try:
            await asyncio.wait_for(self._moved.wait(), timeout_s)
        except TimeoutError:
            return False
        self._moved.clear()
        return True

    @property
    def held_s(self) -> float:
        return time.monotonic() - self._since_s

    @property
    def remaining_s(self) -> float:
        return max(0.0, self.expected_s - self.held_s)

    def describe(self) -> dict[str, Any]:
        return {
            "client": self.client,
            "purpose": self.purpose,
            "run_id": self.run_id,
            "since_s": round(self.held_s, 3),
            "expected_s": self.expected_s,
            "foreign_requests": self.foreign_requests,
        }


class Session:
    """The one holder and the queue. Everything runs on the server's event loop."""

    def __init__(self, on_change: Any = lambda: None) -> None:
        """`on_change()` is called whenever the holder or the queue has changed."""
        self.holder: Ticket | None = None
        self.queue: deque[Ticket] = deque()
        self._on_change = on_change
        self._ended_runs: deque[str] = deque(maxlen=64)

    def enqueue(self, ticket: Ticket) -> None:
        """Take a place; the ranks are the ticket's at once when nobody holds them."""
        self.queue.append(ticket)
        self._advance()

    def take(self, ticket: Ticket) -> None:
        """Hold the ranks now, without queueing. Raises RanksHeld."""
        if self.holder is not None:
            raise RanksHeld(self.sentence())
        self.enqueue(ticket)

    def leave(self, ticket: Ticket) -> None:
        """Give the ranks, or the place in the queue, back."""
        if ticket is self.holder:
            self.holder = None
        elif ticket in self.queue:
            self.queue.remove(ticket)
        else:
            return
        if ticket.run_id:
            self._ended_runs.append(ticket.run_id)
        self._advance()

    def _advance(self) -> None:
        if self.holder is None and self.queue:
            self.holder = self.queue.popleft()
            self.holder.start()
        for ticket in self.queue:
            ticket.wake()
        self._on_change()

    def require(self, run_id: str) -> None:
        """Raises RanksHeld unless the ranks are free or `run_id` is the holder's."""
        if self.holder is not None and (not run_id or self.holder.run_id != run_id):
            raise RanksHeld(self.sentence())

    def note_request(self, run_id: str) -> None:
        """Count a request of somebody who does not hold the ranks against the holder's run."""
        if self.holder is not None and self.holder.run_id != run_id:
            self.holder.foreign_requests += 1

    def has_ended(self, run_id: str) -> bool:
        return run_id in self._ended_runs

    def knows(self, run_id: str) -> bool:
        tickets = [*self.queue, *([self.holder] if self.holder else [])]
        return any(ticket.run_id == run_id for ticket in tickets)

    # ---- what people are told

    def position(self, ticket: Ticket) -> int:
        """1: next; 0: holding, or gone."""
        return self.queue.index(ticket) + 1 if ticket in self.queue else 0

    def eta_s(self, ticket: Ticket) -> float:
        """Seconds until the ticket's turn, if everybody ahead takes as long as they said."""
        ahead = list(self.queue)[: max(0, self.position(ticket) - 1)]
        holding = self.holder.remaining_s if self.holder else 0.0
        return holding + sum(other.expected_s for other in ahead)

    def describe_queue(self) -> list[dict[str, Any]]:
        return [
            {**ticket.describe(), "position": i + 1, "eta_s": round(self.eta_s(ticket), 1)}
            for i, ticket in enumerate(self.queue)
        ]

    def sentence(self) -> str:
        if self.holder is None:
            return "Nobody holds the ranks."
        holder = self.holder
        left = f"about {holder.remaining_s:.0f} s more" if holder.remaining_s else "it should end any moment"
        waiting = f"; {len(self.queue)} wait in line" if self.queue else ""
        return (
            f"{holder.client} holds the ranks for {holder.purpose} since {holder.held_s:.0f} s ({left}{waiting}). "
            f"Ask for a lease to wait in line, or try again later."
        )
