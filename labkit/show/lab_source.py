"""The page's frames from the lab server: finds it, watches it, and holds the ranks for as long as a load lasts.

While somebody looks at the page, one thread here keeps looking for the server: when there is none (yet), and again
when it has gone. Each page is its own client of the server; who presses Start first has the ranks, the others wait in
line and meanwhile see what the server says of itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import msgspec

from labkit.lab.lab import connect
from labkit.lab.live import LiveSession
from labkit.lab.roofs import is_quiet, machine_roofs
from labkit.lab.run import open_store
from labkit.lab.stored import stored_runs
from labkit.measure import metrics
from labkit.paths import data_dir
from labkit.server.client import ServerError
from labkit.show.beside import Pinned, Samples
from labkit.show.frame import LayoutsFrame, Objective
from labkit.show.from_snapshot import frame_of
from labkit.show.live import Wanted
from labkit.show.looking import Looking
from labkit.show.visitor import user_name

LOOK_EVERY_S = 1.0
WINDOW_S = 300.0
"""The ladders cover the current layout's requests of so many seconds: long enough for a p95 at a few a second."""


class LabSource(Looking):
    """A `Source` (see live.py) over this machine's lab server, or over the one at `url`."""

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        super().__init__(url, token)
        self._workloads = sorted(path.stem for path in (data_dir() / "workloads").glob("*.toml"))
        self._objective = Objective()
        self._session: LiveSession | None = None
        self._link, self._why = "connecting", ""
        self._choices: dict[str, Any] = {}
        self._stored: list[dict[str, Any]] = []
        self._pinned: Pinned | None = None
        self._asked_roofs: LiveSession | None = None

    # ---- the link

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            session, self._session, self._link = self._session, None, "connecting"
        if session is not None:
            session.close()

    def _keep(self, closed: threading.Event) -> None:
        while not closed.is_set():
            session = self._session
            if session is not None and session.watch.link == "lost":
                self._drop(session)
            if self._session is None:
                self._connect(closed)
            elif session is not None:
                self._learn_roofs(session)
            closed.wait(LOOK_EVERY_S)

    def _drop(self, session: LiveSession) -> None:
        with self._lock:
            self._session, self._link, self._why = None, "lost", session.watch.message
        session.close()

    def _connect(self, closed: threading.Event) -> None:
        try:
            lab = connect(self._url, self._token, start=False)
            session = lab.live(client=f"a page of {user_name()}", objective=_asked(self._objective))
            session.window.seconds = WINDOW_S
            session.open()
            choices = lab.client.choices()
        except (ServerError, OSError) as error:
            if self._link != "lost":
                self._link, self._why = "absent", str(error)
            return
        with self._lock:
            if closed.is_set():
                session.close()
                return
            self._session, self._link, self._why = session, "connected", ""
            self._choices = choices

    def _learn_roofs(self, session: LiveSession) -> None:
        """For the verdicts, once: whether products or memory hold a step up. Kept ones at once, new ones only while
        nobody measures and the machine has nothing else to do.
        """
        state = session.watch.state
        if session is self._asked_roofs or not state:
            return
        with contextlib.suppress(ServerError, OSError):  # gone meanwhile: the next connection asks anew
            found = machine_roofs(
                state.get("environment") or {}, lambda: is_quiet() and session.client.state()["holder"] is None
            )
            session.answers.roofs = found
            if found or (state.get("environment") or {}).get("backend") != "cpu":
                self._asked_roofs = session

    # ---- what a visitor wants

    def start(self, wanted: Wanted) -> None:
        self._need().start(wanted.layout, wanted.workload, wanted.rate, _settings(wanted))

    def change(self, wanted: Wanted) -> None:
        """What differs from what runs: rate and layout change under the load, another workload is another load."""
        session = self._need()
        now = session.snapshot()
        run, lab = now["run"], now["state"] or {}
        if run is None:
            return
        if run["workload"] != wanted.workload or now["role"] == "queued":
            self.start(wanted)
            return
        if run["rate"] != wanted.rate:
            session.set_rate(wanted.rate)
        settings = {name: value for name, value in _settings(wanted).items() if lab["settings"].get(name) != value}
        if lab["layout"] != wanted.layout or settings:
            session.switch(wanted.layout, settings)

    def set_objective(self, objective: Objective) -> None:
        self._objective = objective
        if self._session is not None:
            self._session.objective = _asked(objective)

    # ---- what the current figures are held against

    def stored(self) -> list[dict[str, Any]]:
        return self._stored

    def look_up(self) -> None:
        """Read the list of stored runs anew."""
        with open_store() as store:
            self._stored = [msgspec.to_builtins(line) for line in stored_runs(store)]

    def pin(self, run_id: str) -> None:
        self._pinned = Pinned.stored(run_id)

    def pin_current(self) -> None:
        samples = self._samples()
        self._pinned = Pinned(samples) if samples else None

    def unpin(self) -> None:
        self._pinned = None

    def _samples(self) -> Samples | None:
        return self._session.window.samples(time.monotonic_ns()) if self._session else None

    def stop(self) -> None:
        if self._session is not None:
            self._session.stop()

    def _need(self) -> LiveSession:
        if self._session is None:
            raise ServerError("There is no lab server to run this on.")
        return self._session

    # ---- what the page sees

    def choices(self) -> dict[str, Any]:
        return self._choices

    def frame(self) -> LayoutsFrame:
        session = self._session
        snapshot = session.snapshot() if session else None
        frame = frame_of(snapshot) if snapshot else LayoutsFrame(link=self._link, link_message=self._why)
        frame.objective, frame.workloads = self._objective, self._workloads
        if self._pinned is not None:
            frame.beside = self._pinned.beside(snapshot, self._samples(), _asked(self._objective))
        return frame


def _settings(wanted: Wanted) -> dict[str, Any]:
    return {"router": wanted.router, "admission": wanted.admission}


def _asked(objective: Objective) -> metrics.Objective:
    return metrics.Objective(ttft_ms=objective.ttft_ms, tpot_ms=objective.tpot_ms)
