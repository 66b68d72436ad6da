"""The ranks, asked for and held on a thread of their own for as long as a live load lasts.

The thread waits in line, sends the load when it is granted, looks after the lease, and ends both together;
what others see of it (`role`, `place`, `error`) are plain fields.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from labkit.lab.plan import new_run_id, utc_now
from labkit.load.driver import DriverError, DriverProcess
from labkit.load.spec import RunSpec
from labkit.load.target import Target
from labkit.measure.records import RequestRecord
from labkit.server.client import Lease, ServerClient, ServerError

ROLES = ("watching", "queued", "switching", "running", "stopping")
_EXPECTED_S = 300.0
"""Told to others in line: a visitor's load has no end of its own."""


class Holding:
    """Set what is to be run (layout, workload, rate, settings), then `begin`; `end` gives everything back."""

    def __init__(
        self,
        client: ServerClient,
        driver: DriverProcess,
        on_granted: Callable[[dict[str, Any] | None], None],
        on_records: Callable[[Sequence[RequestRecord]], None],
        *,
        client_name: str = "",
    ) -> None:
        self.layout, self.workload, self.rate = "tp1", "chat", 1.0
        self.settings: dict[str, Any] = {}
        self.shares = False
        """The workload shares prefixes."""
        self.run_id = ""
        self.started_at = utc_now()
        self.role = "queued"
        self.place: dict[str, Any] = {}
        """position, eta_s, holder and message, while in line."""
        self.counts: dict[str, int] = {}
        """in_flight, sent, and one per status."""
        self.error = ""
        self.lease: Lease | None = None
        self._client, self._driver = client, driver
        self._on_granted, self._on_records = on_granted, on_records
        self._client_name = client_name
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="labkit-live", daemon=True)

    def begin(self) -> None:
        self.run_id = new_run_id(self.layout)
        self._thread.start()

    def end(self) -> None:
        self.role = "stopping"
        self._end.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10)

    def describe(self) -> dict[str, Any]:
        names = ("run_id", "layout", "workload", "rate", "settings", "started_at")
        return {name: getattr(self, name) for name in names} | {"counts": dict(self.counts)}

    def _run(self) -> None:
        try:
            self._hold()
        except (ServerError, DriverError, ValueError, OSError) as error:
            if not self._end.is_set():
                self.error = str(error)
        self.role = "watching"

    def _hold(self) -> None:
        with self._client.lease(
            self.run_id,
            purpose=f"a live load of {self.workload}",
            client=self._client_name,
            layout=self.layout,
            settings=self.settings,
            expected_s=_EXPECTED_S,
            on_line=self._on_line,
        ) as lease:
            self.lease = lease
            self._on_granted(lease.switched)
            self._send()
            self.role = "running"
            try:
                self._look_after(lease)
            finally:
                self._driver.stop()

    def _on_line(self, line: dict[str, Any]) -> None:
        if self._end.is_set() and self.lease is None:
            raise ServerError("The load was stopped while it waited in line.")
        if line["lease"] == "queued":
            self.place = line
        elif line["lease"] == "switching":
            self.role = "switching"

    def _send(self) -> None:
        state = self._client.state()
        target = Target(url=self._client.url, token=self._client.token, model=state["model"], labkit=True)
        spec = RunSpec(
            target=target,
            run_id=self.run_id,
            workload=self.workload,
            rate=self.rate,
            vocab_size=state["vocab_size"],
            max_context=state["max_model_len"],
        )
        self._driver.start(spec, self._on_records, on_progress=self.counts.update, keep_records=False)

    def _look_after(self, lease: Lease) -> None:
        while not self._end.wait(0.2):
            lease.check()
