"""Samples come while somebody wants them, on the event loop's thread, and only then."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

from labkit.server.telemetry import Telemetry


class Watcher:
    def __init__(self) -> None:
        self.wants_telemetry, self.telemetry_source = False, ""
        self.events: list[dict[str, Any]] = []
        self.threads: set[int] = set()

    def on_event(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        self.threads.add(threading.get_ident())


def test_samples_come_while_they_are_wanted() -> None:
    watcher = Watcher()

    async def watch() -> None:
        telemetry = Telemetry(watcher, lambda: {0: os.getpid()})  # type: ignore[arg-type]
        telemetry.start()
        await asyncio.sleep(0.5)
        assert watcher.events == []
        watcher.wants_telemetry = True
        for _ in range(100):
            await asyncio.sleep(0.05)
            if len(watcher.events) >= 2:
                break
        telemetry.stop()

    asyncio.run(watch())
    assert len(watcher.events) >= 2 and watcher.threads == {threading.get_ident()}
    event = watcher.events[-1]
    assert event["event"] == "telemetry" and event["source"] == watcher.telemetry_source in ("nvml", "psutil")
    assert {"host"} < {sample.kind for sample in event["samples"]}
