"""What a run leaves on disk from the server's side: steps and memory while it runs, collectives when it ends.

Writing happens on one thread of its own, so that neither SQLite nor Parquet ever stands between two steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.measure.profile_trace import on_our_clock

if TYPE_CHECKING:
    import numpy as np

    from labkit.measure.collective_log import CollectiveLog
    from labkit.measure.records import MemoryRecord, StepRecord, TelemetryRecord
    from labkit.measure.store import Store

FLUSH_STEPS = 256


class RunRecorder:
    """Records while a run is open; ignores everything otherwise."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, "labkit-store")
        self._store: Store | None = None
        self._log: CollectiveLog | None = None
        self._steps: list[StepRecord] = []
        self._after_step = 0
        self.run_id = ""
        self.error = ""
        """Why the last write failed; empty when all is well."""

    def begin(self, run_id: str, memory: list[MemoryRecord], after_step: int = 0) -> None:
        """Steps up to `after_step` were sent before the run: their figures come later and are not its."""
        self.run_id, self._steps, self.error, self._after_step = run_id, [], "", after_step
        self.add_memory(memory)

    def add_steps(self, steps: list[StepRecord]) -> None:
        if not self.run_id:
            return
        self._steps.extend(step for step in steps if step.step_id > self._after_step)
        if len(self._steps) >= FLUSH_STEPS:
            self._flush_steps()

    def add_memory(self, memory: list[MemoryRecord]) -> None:
        run_id = self.run_id
        if run_id and memory:
            self._write(lambda store: store.add_memory(run_id, memory))

    def add_collectives(self, rows: np.ndarray) -> None:
        """`rows`: labkit.measure.recorder.MERGED_DTYPE."""
        run_id, rows = self.run_id, rows[rows["step_id"] > self._after_step]
        if run_id and len(rows):
            self._write(lambda store: self._append(store, run_id, rows))

    def _append(self, store: Store, run_id: str, rows: np.ndarray) -> None:
        if self._log is None:
            self._log = store.collective_log(run_id)
        self._log.append(rows)

    def add_telemetry(self, samples: list[TelemetryRecord]) -> None:
        run_id = self.run_id
        if run_id:
            self._write(lambda store: store.add_telemetry(run_id, samples))

    def add_profile(self, rank: int, trace: bytes, offset_ns: int = 0) -> None:
        """trace: gzipped Chrome trace events of one rank; empty when it ran no step. offset_ns: of its host's clock."""
        run_id = self.run_id
        if run_id and trace:
            self._write(lambda store: store.add_profile(run_id, rank, on_our_clock(trace, offset_ns)))

    async def end(self) -> None:
        """Write what is left; returns when the run is on disk (or `error` says why not)."""
        if not self.run_id:
            return
        self._flush_steps()
        self.run_id = ""
        self._write(self._close_log)
        await asyncio.wrap_future(self._thread.submit(lambda: None))

    def _close_log(self, store: Store) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def close(self) -> None:
        """Finish what was handed in, a cut-off run's parquet too."""
        if self.run_id:
            self._flush_steps()
            self._write(self._close_log)
        self._thread.shutdown(wait=True)

    def _flush_steps(self) -> None:
        steps, self._steps = self._steps, []
        if steps:
            self._write(lambda store: store.add_steps(steps))

    def _write(self, action: Callable[[Store], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the thread has been shut down: the server is going
            self._thread.submit(self._run, action)

    def _run(self, action: Callable[[Store], None]) -> None:
        try:
            if self._store is None:
                from labkit.measure.store import Store

                self._store = Store(self._path)
            action(self._store)
        except Exception as error:  # a full disk must not stop the run; the release line tells
            self.error = f"{type(error).__name__}: {error}"
            print(f"labkit: the run could not be stored: {self.error}", file=sys.stderr)
