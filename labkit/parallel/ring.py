"""Where the door notes its calls: on CPUs with the host's clock, on CUDA with events that are read after
the step.

Both rings hand out the same rows (`labkit.measure.recorder.RING_DTYPE`). An event costs a microsecond and
never stops the stream; its instant on the host's clock is found from one anchor event, recorded when the
step is over. A stream that is being captured into a graph is left alone: its calls leave no rows.
"""

from __future__ import annotations

import time

import torch

from labkit.measure import recorder


class Ring(recorder.Ring):
    """Rows on the host's monotonic clock; `now` is the clock itself, without a frame in between."""

    now = staticmethod(time.monotonic_ns)


class EventRing:
    """The same for one CUDA device: `now` records an event on the current stream and returns its ticket.

    Tickets count upwards for ever; a drain invalidates those before it, and a call that began before it and
    ends after it leaves no row.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._ring = recorder.Ring(capacity)
        self._events: list[torch.cuda.Event] = []
        self._first, self._next = 0, 0
        self._rows: list[tuple[int, ...]] = []

    def now(self) -> int:
        """Ticket of an event recorded now, or -1 while the stream is being captured."""
        if torch.cuda.is_current_stream_capturing():
            return -1
        at = self._next - self._first
        if at == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[at].record()
        self._next += 1
        return self._next - 1

    def put(self, *row: int) -> None:
        """(group, seq, op, axis, phase, layer, bytes, enter ticket, exit ticket)"""
        if row[7] >= self._first and row[8] >= self._first:
            self._rows.append(row)

    def drain(self) -> bytes:
        """Waits until the device has passed the last event; call it when the step is over."""
        if self._rows:
            anchor = torch.cuda.Event(enable_timing=True)
            anchor.record()
            anchor.synchronize()
            anchor_ns = time.monotonic_ns()
            for *tags, enter, leave in self._rows:
                instants = (self._instant(ticket, anchor, anchor_ns) for ticket in (enter, leave))
                self._ring.put(*tags, *instants)
        self._rows.clear()
        self._first = self._next
        return self._ring.drain()

    def _instant(self, ticket: int, anchor: torch.cuda.Event, anchor_ns: int) -> int:
        return anchor_ns - int(self._events[ticket - self._first].elapsed_time(anchor) * 1e6)
