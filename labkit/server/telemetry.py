"""Samples of the devices beside the engine, five a second, on a thread of their own: NVML may take milliseconds a call.

Nothing is sampled while no run is recorded and nobody watches. The samples are `telemetry` events, and rows of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from labkit.measure.gpu import PERIOD_S, Source, open_source

if TYPE_CHECKING:
    from labkit.server.service import Service


class Telemetry:
    """pids: of the ranks on this machine, as they are now."""

    def __init__(self, service: Service, pids: Callable[[], Mapping[int, int]]) -> None:
        self._service, self._pids = service, pids
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="labkit-telemetry", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        try:
            source = open_source(self._pids)
            self._service.telemetry_source = source.name
            self._sample(source)
        except Exception as error:  # a driver's whim must not end the server; the state says that there is none
            self._service.telemetry_source = ""
            print(f"labkit: telemetry ended: {type(error).__name__}: {error}", file=sys.stderr)

    def _sample(self, source: Source) -> None:
        while not self._stopping.wait(PERIOD_S):
            if self._service.wants_telemetry:
                event = {"event": "telemetry", "source": source.name, "samples": source.sample()}
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._service.on_event, event)
        source.close()
