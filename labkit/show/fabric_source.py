"""The page Fabric's frames from the lab server: it watches, and asks for a measurement when the visitor does.

A measurement is one long answer read on a thread of its own; leaving the page, or Stop, closes it, and with it the
measurement ends. What was measured is fetched anew whenever one has ended or the layout has changed.
"""

from __future__ import annotations

import datetime
import threading
from typing import Any

import msgspec

from labkit.lab.watching import Watch
from labkit.measure.records import TelemetryRecord
from labkit.server.client import ServerClient, ServerError
from labkit.server.discovery import connect
from labkit.show.fabric_frame import FabricFrame, Progress, Timeline
from labkit.show.from_snapshot import lab_of
from labkit.show.looking import Looking
from labkit.show.telemetry_meter import TelemetryMeter
from labkit.show.visitor import user_name

LOOK_EVERY_S = 1.0
EVENTS = ("state", "switch", "lease", "failure", "bench", "telemetry", "timeline")


class FabricSource(Looking):
    """A `Source` (see fabric_page.py) over this machine's lab server, or over the one at `url`."""

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        super().__init__(url, token)
        self._link, self._why, self._notice = "connecting", "", ""
        self._forget()

    def _forget(self) -> None:
        self._client: ServerClient | None = None
        self._watch: Watch | None = None
        self._telemetry = TelemetryMeter()
        self._timeline: Timeline | None = None
        self._progress: Progress | None = None
        self._measured: dict[str, Any] = {}
        self._stale = threading.Event()
        self._layout = ""
        self._asking: Asking | None = None

    # ---- the link

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            self._stale.set()
            watch, asking, self._link = self._watch, self._asking, "connecting"
            self._forget()
        if asking is not None:
            asking.close()
        if watch is not None:
            watch.close()

    def _keep(self, closed: threading.Event) -> None:
        """Connected, if there is a server; and what was measured, fresh."""
        while not closed.is_set():
            watch = self._watch
            if watch is not None and watch.link == "lost":
                with self._lock:
                    self._forget()
                    self._link, self._why = "lost", watch.message
                watch.close()
            if self._watch is None:
                self._connect(closed)
            elif self._stale.is_set():
                self._fetch()
            self._stale.wait(LOOK_EVERY_S)

    def _connect(self, closed: threading.Event) -> None:
        try:
            client = connect(self._url, self._token, start=False)
            watch = Watch(client, self._on_event, EVENTS)
            watch.open()
        except (ServerError, OSError) as error:
            if self._link != "lost":
                self._link, self._why = "absent", str(error)
            closed.wait(LOOK_EVERY_S)
            return
        with self._lock:
            if closed.is_set():
                watch.close()
                return
            self._client, self._watch, self._link, self._why = client, watch, "connected", ""
            self._stale.set()

    def _fetch(self) -> None:
        client = self._client
        self._stale.clear()
        if client is None:
            return
        try:
            self._measured = client.fabric()
        except (ServerError, OSError):
            return  # it is starting, or going: a later event asks again

    # ---- what the server says, on the stream's thread

    def _on_event(self, kind: str, event: dict[str, Any]) -> None:
        if kind == "telemetry":
            self._telemetry.add(event["source"], msgspec.convert(event["samples"], list[TelemetryRecord]))
        elif kind == "timeline":
            self._timeline = msgspec.convert(event, Timeline)
        elif kind == "bench":
            self._progress = msgspec.convert(event["progress"], Progress) if event["progress"] else None
            if self._progress is None:
                self._stale.set()
        elif kind in ("state", "switch"):
            self._note_layout(f"{event.get('layout')} {event.get('state', 'ready')}")

    def _note_layout(self, layout: str) -> None:
        if layout != self._layout:
            self._layout, self._timeline = layout, None
            self._stale.set()

    # ---- what a visitor wants

    def measure(self) -> None:
        with self._lock:
            if self._client is None:
                raise ServerError("There is no lab server to measure.")
            if self._asking is not None and self._asking.is_alive():
                return
            self._notice = ""
            self._asking = Asking(self._client, self._refused)
            self._asking.start()

    def _refused(self, sentence: str) -> None:
        self._notice = sentence

    def stop(self) -> None:
        asking = self._asking
        if asking is not None:
            asking.close()

    # ---- what the page sees

    def measured(self) -> dict[str, Any]:
        return self._measured

    def frame(self) -> FabricFrame:
        watch = self._watch
        frame = FabricFrame(link=self._link, link_message=self._why, notice=self._notice)
        state = watch.state if watch is not None else None
        if watch is None or state is None:
            return frame
        frame.lab = lab_of(state, {"failure": watch.failure, "run": None})
        frame.lab.ownership = []
        frame.nodes, frame.groups = state.get("nodes", []), state.get("groups", [])
        frame.link_between = (state.get("topology") or {}).get("link") or ""
        frame.telemetry = self._telemetry.snapshot()
        if self._timeline is not None:
            frame.timeline = self._timeline
            frame.timeline.one_clock = state.get("clock") != "minimum"
        frame.progress = self._progress
        if frame.progress is not None:
            frame.progress.is_yours = self._asking is not None and self._asking.is_alive()
            if frame.progress.is_yours and frame.lab.holder is not None:
                frame.lab.holder.is_you = True
        self._tell_when(frame, state)
        return frame

    def _tell_when(self, frame: FabricFrame, state: dict[str, Any]) -> None:
        measured = self._measured.get("measured")
        if not measured:
            return
        at = datetime.datetime.fromisoformat(measured["measured_at"])
        frame.measured_at = at.astimezone().strftime("%Y-%m-%d %H:%M")
        started = (state.get("environment") or {}).get("started_at", "")
        is_new = bool(started) and at >= datetime.datetime.fromisoformat(started)
        frame.provenance = "measured" if is_new else "recorded"


class Asking(threading.Thread):
    """One measurement, read to its end."""

    def __init__(self, client: ServerClient, refused: Any) -> None:
        super().__init__(daemon=True, name="labkit-measure")
        self._client, self._refused = client, refused
        self._closing = threading.Event()

    def run(self) -> None:
        try:
            self._client.measure_fabric(self._look, client=f"a page of {user_name()}")
        except _Closed:
            return
        except (ServerError, OSError) as error:
            self._refused(str(error))

    def _look(self, _: dict[str, Any]) -> None:
        if self._closing.is_set():
            raise _Closed

    def close(self) -> None:
        """With the next line, which comes five times a second."""
        self._closing.set()


class _Closed(Exception):
    """The visitor has stopped it."""
