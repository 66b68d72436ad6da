"""What the lab server says while one watches: its state, its queues, its last failure, and whether it still
speaks.

One thread reads the event stream; the newest word of each kind is kept, with a minute of queue lengths.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from labkit.server.client import EventStream, ServerClient

_HISTORY_S = 60
_ENGINE_HZ = 8


class Watch:
    """`on_event(kind, event)` sees every event after it was noted here. `link`: absent, connected or lost."""

    def __init__(
        self, client: ServerClient, on_event: Callable[[str, dict[str, Any]], None], kinds: Iterable[str] = ()
    ) -> None:
        """kinds: of events; none: those that everybody gets."""
        self.link, self.message = "absent", ""
        self.state: dict[str, Any] | None = None
        self._client, self._on_event, self._kinds = client, on_event, tuple(kinds)
        self._stream: EventStream | None = None
        self._lock = threading.Lock()
        self._failure: dict[str, Any] | None = None
        self._queues: deque[tuple[int, int, int]] = deque(maxlen=_HISTORY_S * _ENGINE_HZ)
        self._switches: deque[tuple[int, str]] = deque(maxlen=32)

    def open(self) -> None:
        """Begin, or begin again after the link was lost. Raises ServerError when nobody answers."""
        with self._lock:
            if self.link == "connected":
                return
            self._stream = self._client.events(self._take, self._kinds, on_end=self._lost)
            self.link, self.message = "connected", ""

    def close(self) -> None:
        with self._lock:
            stream, self._stream = self._stream, None
            self.link = "absent"
        if stream is not None:
            stream.close()

    def _lost(self, why: str) -> None:
        self.link, self.message = "lost", why

    def _take(self, event: dict[str, Any]) -> None:
        kind = event.pop("event")
        note = getattr(self, f"_on_{kind}", None)
        if note is not None:
            note(event)
        self._on_event(kind, event)

    def _on_state(self, event: dict[str, Any]) -> None:
        self.state = event
        self._failure = event.get("failure") or self._failure
        if event.get("state") == "ready":
            self._failure = None

    def _on_lease(self, event: dict[str, Any]) -> None:
        if self.state is not None:
            self.state = {**self.state, **event}

    def _on_memory(self, event: dict[str, Any]) -> None:
        if self.state is not None:
            self.state = {**self.state, "memory": event["ranks"]}

    def _on_engine(self, event: dict[str, Any]) -> None:
        replicas = event["replicas"]
        waiting = sum(replica["waiting"] for replica in replicas)
        running = sum(replica["running"] for replica in replicas)
        self._queues.append((time.monotonic_ns(), waiting, running))
        if self.state is not None:
            self.state = {**self.state, "replicas": replicas}

    def _on_switch(self, event: dict[str, Any]) -> None:
        self._switches.append((time.monotonic_ns(), str(event["layout"])))

    def _on_failure(self, event: dict[str, Any]) -> None:
        self._failure = event

    @property
    def failure(self) -> dict[str, Any] | None:
        """The last one, until the ranks are back."""
        return self._failure

    def snapshot(self, now_ns: int) -> dict[str, Any]:
        """link, message, state, failure, queues {age_s, waiting, running}, marks [{age_s, layout}]."""
        queues = [entry for entry in list(self._queues) if now_ns - entry[0] <= _HISTORY_S * 1e9]
        return {
            "link": self.link,
            "message": self.message,
            "state": self.state,
            "failure": self._failure,
            "queues": {
                "age_s": [(now_ns - at_ns) / 1e9 for at_ns, _, _ in queues],
                "waiting": [waiting for _, waiting, _ in queues],
                "running": [running for _, _, running in queues],
            },
            "marks": [
                {"age_s": (now_ns - at_ns) / 1e9, "layout": layout}
                for at_ns, layout in list(self._switches)
                if now_ns - at_ns <= _HISTORY_S * 1e9
            ],
        }
