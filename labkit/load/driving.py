"""One run as its parent sees it: events of the driver come in, callbacks and at last a report come out.

Everything but `wait` runs in the driver's reader thread, in the order in which the driver spoke. A callback that raises
breaks the run off: it goes to its end unheard, and then has failed for that reason.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from labkit.load.driver_child import Ended, Event, Failed, Progress, Records, Started
from labkit.load.report import LoadReport
from labkit.load.spec import RunSpec
from labkit.measure.records import RequestRecord

OnRecords = Callable[[Sequence[RequestRecord]], None]


class DriverError(RuntimeError):
    """The driver could not run the load, or ended before it was done; the message says why."""


class Driving:
    """One run that a driver drives. Made by `DriverProcess.start`."""

    def __init__(
        self,
        spec: RunSpec,
        on_records: OnRecords | None,
        on_start: Callable[[int], None] | None,
        on_progress: Callable[[dict[str, int]], None] | None,
        on_end: Callable[[Driving], None] | None,
        keep_records: bool,
    ) -> None:
        self.spec = spec
        self.start_ns = 0
        self.report: LoadReport | None = None
        self.error = ""
        self.refusal = ""
        """The last command that the driver refused, in its words."""
        self._on_records, self._on_start = on_records, on_start
        self._on_progress, self._on_end = on_progress, on_end
        self._kept: list[RequestRecord] | None = [] if keep_records else None
        self._broken = ""
        self._started, self._over = threading.Event(), threading.Event()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def wait_started(self, timeout_s: float | None = None) -> bool:
        """Whether the schedule has begun (or the run is over already) within `timeout_s`."""
        return self._started.wait(timeout_s)

    def wait(self, timeout_s: float | None = None) -> LoadReport:
        """The report, with the records if they were to be kept. Raises DriverError or TimeoutError."""
        if not self._over.wait(timeout_s):
            raise TimeoutError(f"the run {self.spec.run_id} is not over after {timeout_s:g} s.")
        if self.report is None:
            raise DriverError(self.error)
        return self.report

    def take(self, event: Event) -> None:
        """Applies one event of the driver (reader thread)."""
        if self._broken:
            if isinstance(event, Ended | Failed):
                self.fail(self._broken)
        elif isinstance(event, Records):
            self._take_records(event.records)
        elif isinstance(event, Started):
            self.start_ns = event.start_ns
            self._started.set()
            if self._on_start is not None:
                self._on_start(event.start_ns)
        elif isinstance(event, Progress):
            if self._on_progress is not None:
                self._on_progress(event.counts)
        elif isinstance(event, Ended):
            event.report.records = sorted(self._kept or [], key=lambda record: record.index)
            self.report = event.report
            self._finish()
        elif event.fatal:
            self.fail(event.error)
        else:
            self.refusal = event.error

    def _take_records(self, records: list[RequestRecord]) -> None:
        if self._kept is not None:
            self._kept.extend(records)
        if self._on_records is not None:
            self._on_records(records)

    def break_off(self, error: str) -> None:
        """The run goes to its end unheard, and then has failed for this reason."""
        if self._broken:  # the callback of the end itself
            return
        self._broken = error
        self.report = None
        if self.over:
            self.error = error

    def fail(self, error: str) -> None:
        if not self.over:
            self.error = error
            self._finish()

    def _finish(self) -> None:
        self._started.set()
        self._over.set()
        if self._on_end is not None:
            self._on_end(self)
