"""One stream of events for everybody who watches: encoded once, bounded for each, never in the engine's way.

A watcher who reads too slowly loses the oldest of the frequent kinds (`engine`, `steps`, `telemetry`) and is told how
many; what changes the picture (state, switch, lease, failure, request) goes only when nothing else is left to drop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import msgspec

KINDS = (
    "state", "request", "steps", "engine", "memory", "switch", "lease", "failure", "profile", "telemetry", "bench",
    "timeline",
)  # fmt: skip
ON_REQUEST = frozenset(("timeline",))
"""Kinds that only who names them gets: they are large, and made for one page."""
_DROPPABLE = frozenset(("engine", "steps", "telemetry", "timeline"))
CAPACITY = 2048
"""Events that wait for one watcher: about four minutes of a busy engine's."""
_encode = msgspec.json.Encoder().encode


class Subscriber:
    """One watcher's queue. `run_id` leaves out requests and steps of other runs; no kinds: all but ON_REQUEST."""

    def __init__(self, kinds: Iterable[str] = (), run_id: str = "", capacity: int = CAPACITY) -> None:
        self._kinds = frozenset(kinds) or frozenset(KINDS) - ON_REQUEST
        self._run_id = run_id
        self._capacity = capacity
        self._queue: deque[tuple[str, bytes]] = deque()
        self._dropped: Counter[str] = Counter()
        self._wake = asyncio.Event()

    def wants(self, kind: str, run_id: str | None) -> bool:
        if kind not in self._kinds:
            return False
        return not self._run_id or run_id is None or run_id == self._run_id

    def put(self, kind: str, line: bytes) -> None:
        if len(self._queue) >= self._capacity:
            self._drop_one()
        self._queue.append((kind, line))
        self._wake.set()

    def _drop_one(self) -> None:
        at = next((i for i, (kind, _) in enumerate(self._queue) if kind in _DROPPABLE), 0)
        self._dropped[self._queue[at][0]] += 1
        del self._queue[at]

    async def lines(self, timeout_s: float) -> bytes:
        """All that waits, as NDJSON; a single newline when nothing came for `timeout_s`."""
        try:
            await asyncio.wait_for(self._wake.wait(), timeout_s)
        except TimeoutError:
            return b"\n"
        self._wake.clear()
        lines = [line for _, line in self._queue]
        self._queue.clear()
        if self._dropped:
            lines.insert(0, _encode({"event": "dropped", **self._dropped}) + b"\n")
            self._dropped.clear()
        return b"".join(lines)


class EventHub:
    def __init__(self) -> None:
        self._subscribers: set[Subscriber] = set()

    def wants(self, kind: str) -> bool:
        """Whether anybody watches that kind."""
        return any(each.wants(kind, None) for each in self._subscribers)

    @property
    def num_subscribers(self) -> int:
        return len(self._subscribers)

    def subscribe(self, subscriber: Subscriber) -> None:
        self._subscribers.add(subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        self._subscribers.discard(subscriber)

    def publish(self, event: dict[str, Any]) -> None:
        """Costs nothing but a lookup when nobody wants the event; never waits."""
        kind, run_id = event["event"], _run_of(event)
        wanting = [s for s in self._subscribers if s.wants(kind, run_id)]
        if wanting:
            line = _encode(event) + b"\n"
            for subscriber in wanting:
                subscriber.put(kind, line)


def _run_of(event: dict[str, Any]) -> str | None:
    """The run that an event belongs to; None when it belongs to everybody."""
    if event["event"] in ("request", "profile"):
        return str(event.get("run_id", ""))
    if event["event"] == "steps" and event["steps"]:
        return str(event["steps"][0].run_id)
    return None
