"""Load from a process of its own, so that a busy notebook or page never delays a send.

`DriverProcess` is the handle: a light, thread-based wrapper around `python -m labkit.load.driver` that stays
warm between runs. Callbacks come from one reader thread, in order: start, record batches, progress, end. The
process dies with its parent, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import IO

import msgspec

from labkit.load.driver_child import Command, Event, SetRate, Start, Stop
from labkit.load.driving import DriverError, Driving, OnRecords
from labkit.load.pacing import check_rate
from labkit.load.report import LoadReport
from labkit.load.spec import RunSpec, schedule_of
from labkit.load.trace import find_trace
from labkit.paths import repo_dir

__all__ = ["DriverError", "DriverProcess", "Driving", "OnRecords", "check_spec"]


class DriverProcess:
    """A warm load generator. Use as a context manager, or `close` it; closing ends the process.

    `warm` starts the process ahead of the first run (0.3 s or so); otherwise `start` does.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._driving: Driving | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> DriverProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def warm(self) -> None:
        """Starts the process when none is alive."""
        with self._lock:
            if self.pid is None:
                self._spawn()

    def _spawn(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        paths = [str(repo_dir()), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "labkit.load.driver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C in a shell or notebook is the parent's to handle
        )
        threading.Thread(target=self._read, args=(self._process,), daemon=True, name="labkit-driver").start()

    def start(
        self,
        spec: RunSpec,
        on_records: OnRecords | None = None,
        *,
        on_start: Callable[[int], None] | None = None,
        on_progress: Callable[[dict[str, int]], None] | None = None,
        on_end: Callable[[Driving], None] | None = None,
        keep_records: bool = True,
    ) -> Driving:
        """Begins a run and returns at once.

        Callbacks run in the reader thread: on_records(batch), on_start(start_ns), on_progress(counts),
        on_end(driving). keep_records: False for an endless run, whose report then has none. Raises ValueError
        for a spec that makes no sense and DriverError when a run is under way.
        """
        check_spec(spec)
        if self._driving is not None and not self._driving.over:
            raise DriverError("a run is already under way in this driver; stop it and wait for its end first.")
        self.warm()
        self._driving = Driving(spec, on_records, on_start, on_progress, on_end, keep_records)
        self._tell(Start(spec))
        return self._driving

    def run(self, spec: RunSpec, on_records: OnRecords | None = None, timeout_s: float | None = None) -> LoadReport:
        """One run from start to end."""
        return self.start(spec, on_records).wait(timeout_s)

    def stop(self, timeout_s: float = 10.0) -> LoadReport | None:
        """Sends nothing more and cancels what is under way. The run's report, None without a run."""
        driving = self._driving
        if driving is None:
            return None
        if not driving.over:
            self._tell(Stop())
        return driving.wait(timeout_s)

    def set_rate(self, rate: float) -> None:
        """Requests per second from now on, for a run without an end."""
        check_rate(rate)
        driving = self._driving
        if driving is None or driving.over:
            raise DriverError("no run is under way whose rate could change.")
        if not driving.spec.endless:
            raise DriverError("only a run without an end has a rate that can change; start it without seconds.")
        self._tell(SetRate(rate))

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the process and waits for it. Safe to call twice."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _tell(self, command: Command) -> None:
        process = self._process
        if process is None or process.stdin is None:
            raise DriverError("the driver is closed.")
        try:
            process.stdin.write(msgspec.json.encode(command) + b"\n")
            process.stdin.flush()
        except OSError as error:
            raise DriverError(self._obituary(process)) from error

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        decode = msgspec.json.Decoder(Event).decode
        with process.stdout:
            for line in process.stdout:
                if self._driving is not None:
                    self._take(self._driving, decode(line))
        process.wait()
        if self._driving is not None and self._process in (process, None):  # not one that came after
            self._driving.fail(self._obituary(process))

    def _take(self, driving: Driving, event: Event) -> None:
        """A callback that raises ends its run, not the thread that reads."""
        try:
            driving.take(event)
        except Exception as error:
            driving.break_off(f"a callback of the run raised {error!r}")
            with contextlib.suppress(DriverError):
                self._tell(Stop())

    def _obituary(self, process: subprocess.Popen[bytes]) -> str:
        tail = ""
        if self._errors is not None and not self._errors.closed:
            self._errors.seek(0)
            tail = self._errors.read()[-2000:].decode("utf-8", "replace").strip().rpartition("\n")[2]
        how = f"exit code {process.poll()}" if process.poll() is not None else "it closed its input"
        return f"the load driver ended before the run did ({how}){': ' + tail if tail else ''}"


def check_spec(spec: RunSpec) -> None:
    """Says what is wrong with a spec here, where it was made; a schedule is not drawn whole for that."""
    if spec.trace is not None:
        find_trace(spec.trace.path)
    else:
        schedule_of(msgspec.structs.replace(spec, seconds=None, num_requests=spec.num_requests and 1))


if __name__ == "__main__":
    from labkit.load.driver_child import main

    main()
