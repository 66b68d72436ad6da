"""The page Planner's hold on the lab server: what could run here, and one small run of the layout that is looked at.

The server's model stands for itself, not for the one that is planned: what the run shows is how far a prediction for
this machine is off on this machine. That prediction is made for the very load that is sent, by the simulator with the
steps that `labkit calibrate` measured; without a calibration there is none, and the page says so.
"""

from __future__ import annotations

import threading
from typing import Any

from labkit.lab.lab import connect
from labkit.lab.live import LiveSession
from labkit.load.workload import load_workload
from labkit.measure.metrics import Objective
from labkit.server.client import ServerError
from labkit.show.from_snapshot import lab_of, remarks_of
from labkit.show.looking import Looking
from labkit.show.planner_frame import Here, PlannerFrame, Trial, TrialRow
from labkit.show.planner_here import Expected, expect
from labkit.show.planner_inputs import Inputs
from labkit.show.visitor import user_name

LOOK_EVERY_S = 1.0
WINDOW_S = 600.0
USUAL = "chat"
"""What runs here when the plan is for two lengths or a trace: those are rarely of a size for the lab's models."""
PERCENTILES = ("p50", "p95")
LEAST = {"p50": 5, "p95": 20}
"""Requests before a percentile is shown: with fewer, the p95 is the maximum."""


class PlannerLab(Looking):
    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        super().__init__(url, token)
        self._session: LiveSession | None = None
        self._link = "offline"
        self._here: Here | None = None
        self._asked: tuple[str, str, float] | None = None
        self._expected: Expected | None = None

    # ---- the link

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            session, self._session, self._link, self._here = self._session, None, "offline", None
        if session is not None:
            session.close()

    def _keep(self, closed: threading.Event) -> None:
        while not closed.is_set():
            session = self._session
            if session is not None and session.watch.link == "lost":
                with self._lock:
                    self._session, self._link, self._here = None, "offline", None
                session.close()
            if self._session is None:
                self._connect(closed)
            closed.wait(LOOK_EVERY_S)

    def _connect(self, closed: threading.Event) -> None:
        try:
            lab = connect(self._url, self._token, start=False)
            session = lab.live(client=f"a page of {user_name()}", objective=Objective())
            session.window.seconds = WINDOW_S
            session.open()
            choices, state = lab.client.choices(), lab.client.state()
        except (ServerError, OSError):
            return  # planning needs none; the next look may find one
        with self._lock:
            if closed.is_set():
                session.close()
                return
            self._session, self._link = session, "connected"
            self._here = Here(str(state["model"]), int(choices["num_ranks"]), list(choices["legal"]))

    # ---- one run

    def start(self, layout: str, inputs: Inputs) -> None:
        session, here = self._session, self._here
        if session is None or here is None:
            raise ServerError("There is no lab server to run this on: `labkit serve` starts one.")
        if layout not in here.legal:
            raise ServerError(f"{here.model} on {here.num_ranks} ranks cannot run {layout}.")
        name = USUAL if inputs.workload in ("lengths", "trace") else inputs.workload
        rate = load_workload(name).arrival.rate
        self._asked, self._expected = (layout, name, rate), None
        session.start(layout, name, rate)
        self._expected = expect(here.model, layout, name, rate)

    def stop(self) -> None:
        if self._session is not None:
            self._session.stop()

    # ---- what the page sees

    def frame(self) -> PlannerFrame:
        session = self._session
        frame = PlannerFrame(link=self._link, here=self._here)
        if session is None:
            return frame
        snapshot = session.snapshot()
        state = snapshot["state"]
        if state:
            frame.lab = lab_of(state, snapshot)
            frame.lab.ownership = []
        frame.role, frame.notice = snapshot["role"], snapshot["error"]
        frame.position = int((snapshot["waiting_in_line"] or {}).get("position", 0))
        if self._asked is not None and self._here is not None:
            frame.trial = self._trial(snapshot, self._asked, self._here)
            frame.quality = remarks_of(snapshot["quality"])
        return frame

    def _trial(self, snapshot: dict[str, Any], asked: tuple[str, str, float], here: Here) -> Trial:
        layout, workload, rate = asked
        expected, rows = self._expected, []
        for metric in ("ttft", "tpot"):
            measured = snapshot.get(f"{metric}_ms") or {}
            for name in PERCENTILES:
                n = int(measured.get("n") or 0)
                low, figure, high = expected.figures[f"{metric}_{name}"] if expected else (None, None, None)
                seen = measured.get(name) if n >= LEAST[name] else None
                rows.append(TrialRow(metric, f"{metric.upper()} {name}", figure, low, high, seen, n))
        n = max((row.n for row in rows), default=0)
        told = (expected.calibrated_at, list(expected.notes)) if expected else ("", [])
        return Trial(layout, here.model, workload, rate, snapshot["role"], 0, n, expected is not None, rows, *told)
