"""A request is seen twice, by the client and by the server; the two sightings are joined by its id.

They come by different ways and in either order. A client's record waits a moment for the server's share,
then goes on without it: what the server did not tell is missing from the parts of TTFT, not from TTFT.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from labkit.measure.records import RequestRecord, ServerTimes


class Joiner:
    """`on_joined(record)` is called once for each record, with `record.server` set if it came in time."""

    def __init__(self, on_joined: Callable[[RequestRecord], None], patience_s: float = 1.0) -> None:
        self._on_joined = on_joined
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._records: dict[str, tuple[float, RequestRecord]] = {}
        self._times: dict[str, ServerTimes] = {}

    def add_records(self, records: Iterable[RequestRecord]) -> None:
        with self._lock:
            ready = [record for record in records if self._is_ready(record)]
        for record in ready:
            self._on_joined(record)
        self.expire()

    def _is_ready(self, record: RequestRecord) -> bool:
        record.server = self._times.pop(record.request_id, None)
        if record.server is None and record.http_status == 200:
            self._records[record.request_id] = (time.monotonic() + self._patience_s, record)
            return False
        return True  # never reached the engine, or joined

    def add_times(self, times: ServerTimes) -> None:
        with self._lock:
            waiting = self._records.pop(times.request_id, None)
            if waiting is None:
                self._times[times.request_id] = times
                return
        waiting[1].server = times
        self._on_joined(waiting[1])

    def expire(self, *, everything: bool = False) -> None:
        """Let go of what has waited long enough; `everything`: whatever waits."""
        now = time.monotonic()
        with self._lock:
            due = [key for key, (until, _) in self._records.items() if everything or until <= now]
            records = [self._records.pop(key)[1] for key in due]
        for record in records:
            self._on_joined(record)

    @property
    def num_waiting(self) -> int:
        return len(self._records)
