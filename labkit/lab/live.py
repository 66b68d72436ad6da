"""A load that goes on while its layout and its rate are changed: what the live page stands on.

The session watches the server from the moment it is opened; `start` waits in line for the ranks on a thread
of its own, holds them as long as the load lasts, and gives them back with `stop`. Every method may be
called from any thread; none waits for a load. `snapshot` is cheap enough to be taken eight times a second.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

import msgspec

from labkit.lab.answers import Answers
from labkit.lab.holding import Holding
from labkit.lab.joining import Joiner
from labkit.lab.watching import Watch
from labkit.load.driver import DriverProcess
from labkit.load.workload import load_workload
from labkit.measure.breakdown import handoff_figures
from labkit.measure.clocks import uncertainty_ms
from labkit.measure.crossing_meter import CrossingMeter, Crossings
from labkit.measure.experts import ExpertMeter
from labkit.measure.gantt import StageGantt
from labkit.measure.metrics import Objective, Window
from labkit.measure.quality import Circumstances, Verdict, verdicts
from labkit.measure.records import Environment, RequestRecord, ServerTimes, StepRecord
from labkit.measure.window import SlidingWindow, StepMeter
from labkit.server.client import ServerClient, ServerError

_QUALITY_EVERY_S, _QUALITY_ROWS = 2.0, 400
_GANTT_EVERY_S = 1.0


class LiveSession:
    """One visitor's view and load. `objective` may be set at any time."""

    def __init__(self, client: ServerClient, *, client_name: str = "", objective: Objective) -> None:
        self.client = client
        self.objective = objective
        self.window, self.meter = SlidingWindow(), StepMeter()
        self.crossings, self.experts, self.gantt = CrossingMeter(), ExpertMeter(), StageGantt()
        self.answers = Answers()
        self.watch = Watch(client, self._on_event)
        self._name = client_name
        self._driver = DriverProcess()
        self._joiner = Joiner(self._joined)
        self._recent: deque[RequestRecord] = deque(maxlen=_QUALITY_ROWS)
        self._quality: tuple[float, list[Verdict]] = (0.0, [])
        self._stages: tuple[float, dict[str, Any] | None] = (0.0, None)
        self._lock = threading.RLock()
        self._holding: Holding | None = None
        self._switch: dict[str, Any] | None = None
        self._ready_ns = self._asked_ns = 0
        self._layout: str | None = None

    # ---- what a visitor does

    def open(self) -> None:
        """Begin to watch, and have the load driver ready.

        Raises ServerError when the server does not answer.
        """
        self.watch.open()
        self._driver.warm()

    def start(self, layout: str, workload: str, rate: float, settings: dict[str, Any] | None = None) -> None:
        """Ask for the ranks, switch, and send `workload` at `rate` requests/s until `stop`.

        Returns at once.
        """
        shares = any(part.sharing for part in load_workload(workload).parts)  # refuses an unknown one here
        _check_rate(rate)
        self.stop()
        self.open()
        with self._lock:
            holding = Holding(
                self.client, self._driver, self._granted, self._joiner.add_records, client_name=self._name
            )
            holding.layout, holding.workload, holding.rate = layout, workload, rate
            holding.settings, holding.shares = settings or {}, shares
            self._holding, self._switch = holding, None
        holding.begin()

    def switch(self, layout: str, settings: dict[str, Any] | None = None) -> dict[str, Any]:
        """Another layout under the same load; returns the report. Raises ServerError when refused."""
        holding = self._need_load()
        holding.role = "switching"
        begun_ns = time.monotonic_ns()
        try:
            report = self.client.switch(layout, run_id=holding.run_id, probe=False, **(settings or {}))
        finally:
            holding.role = "running"
        with self._lock:
            holding.layout, holding.settings = layout, {**holding.settings, **(settings or {})}
            self._layout_ready(dict(report), begun_ns)
        return dict(report)

    def set_rate(self, rate: float) -> None:
        """Requests/s from now on; ladders and answers begin anew, for what they had was under another load."""
        _check_rate(rate)
        holding = self._need_load()
        self._driver.set_rate(rate)
        holding.rate = rate
        now = time.monotonic_ns()
        with self._lock:
            self.window.reset(now)
            self.answers.reset(now)
            self._recent.clear()

    def stop(self) -> None:
        """End the load and give the ranks back. Does nothing without one."""
        with self._lock:
            holding, self._holding = self._holding, None
        if holding is not None:
            holding.end()

    def close(self) -> None:
        self.stop()
        self.watch.close()
        self._driver.close()

    def __enter__(self) -> LiveSession:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what comes in, on the threads of the stream and of the driver

    def _on_event(self, kind: str, event: dict[str, Any]) -> None:
        holding = self._holding
        run_id = holding.run_id if holding else ""
        if kind == "request" and event["run_id"] == run_id:
            self._joiner.add_times(msgspec.convert(event, ServerTimes))
        elif kind == "steps":
            self._add_steps(msgspec.convert(event["steps"], list[StepRecord]), event.get("crossings", []))
        elif kind == "switch" or (kind == "state" and event.get("layout") != self._layout):
            self._layout = event.get("layout")
            self._begin_anew(time.monotonic_ns())

    def _add_steps(self, steps: list[StepRecord], crossings: list[Any]) -> None:
        with self._lock:
            for meter in (self.meter, self.experts, self.gantt, self.answers):
                meter.add(steps)
            begun_ns = min((step.start_ns for step in steps), default=0)
            self.crossings.add(msgspec.convert(crossings, list[Crossings]), time.monotonic_ns(), begun_ns)

    def _reset_steps(self, now_ns: int) -> None:
        with self._lock:
            self.meter.reset(now_ns)
            self.crossings.reset(now_ns)
            self.experts.reset(now_ns)
            self.gantt.reset(now_ns)
            self.answers.reset(now_ns)
            self._stages = (0.0, None)

    def _joined(self, record: RequestRecord) -> None:
        with self._lock:
            self.window.add(record)
            self._recent.append(record)
            self._note_first_token(record)

    def _note_first_token(self, record: RequestRecord) -> None:
        """The new layout's first token: the earliest that any request got after it was ready."""
        if self._switch is None:
            return
        after = next((at_ns for at_ns in record.chunk_ns if at_ns >= self._ready_ns), None)
        if after is not None:
            seconds = (after - self._asked_ns) / 1e9
            self._switch["first_token_s"] = min(seconds, self._switch.get("first_token_s") or seconds)

    def _granted(self, report: dict[str, Any] | None) -> None:
        """The ranks are ours, in the layout that was asked for; the load is about to begin."""
        now = time.monotonic_ns()
        switched_ns = round((report or {}).get("ready_s", 0.0) * 1e9)
        with self._lock:
            self.window.start(now)
            self._layout_ready(report or {"ready_s": None}, now - switched_ns)

    def _begin_anew(self, now_ns: int) -> None:
        """Nothing of the layout that was: its figures would stand under the other's name."""
        with self._lock:
            self.window.reset(now_ns)
            self._reset_steps(now_ns)
            self._recent.clear()

    def _layout_ready(self, report: dict[str, Any], asked_ns: int) -> None:
        now = time.monotonic_ns()
        self._begin_anew(now)
        self._switch = {"first_token_s": None, **report}
        self._ready_ns, self._asked_ns = now, asked_ns

    def _need_load(self) -> Holding:
        holding = self._holding
        if holding is None or holding.role not in ("running", "switching"):
            raise ServerError("There is no load to change: start one first.")
        return holding

    # ---- what goes out

    def snapshot(self) -> dict[str, Any]:
        """Everything that the page shows, of the current layout and the last seconds; JSON-ready."""
        self._joiner.expire()
        now = time.monotonic_ns()
        holding = self._holding
        picture = self.watch.snapshot(now)
        with self._lock:
            figures = self.window.snapshot(now, self.objective)
            switch = dict(self._switch) if self._switch else None
            steps = self.meter.snapshot(now, range(int((picture["state"] or {}).get("num_ranks", 0))))
            axes = {"crossings": self.crossings.snapshot(now), "experts": self.experts.snapshot(now)}
        return {
            **picture,
            **figures,
            **steps,
            **axes,
            "gantt": self._gantt(),
            **self._of_recent(),
            **self._answers(picture["state"] or {}),
            "role": holding.role if holding else "watching",
            "waiting_in_line": holding.place if holding and holding.role == "queued" else None,
            "run": holding.describe() if holding else None,
            "in_flight": holding.counts.get("in_flight", 0) if holding else 0,
            "error": holding.error if holding else "",
            "switch": switch,
            "objective": self.objective.to_dict(),
            "quality": self._verdicts(holding),
        }

    def _gantt(self) -> dict[str, Any] | None:
        """Anew once a second: a picture that changed with every frame could not be read."""
        at, found = self._stages
        if time.monotonic() - at > _GANTT_EVERY_S:
            clock_ms = uncertainty_ms((self.watch.state or {}).get("clocks")) or None
            with self._lock:
                found = self.gantt.snapshot()
                found = found and {**found, "clock_ms": clock_ms}
                self._stages = (time.monotonic(), found)
        return found

    def _of_recent(self) -> dict[str, Any]:
        """Of the requests that have ended lately: tokens of prompt and answer (None before the first), and what moved
        between pools.
        """
        with self._lock:
            rows = list(self._recent)
        lengths = [row.prompt_tokens + row.n for row in rows if row.n]
        mean = sum(lengths) / len(lengths) if lengths else None
        return {"tokens_per_request": mean, "handoff": handoff_figures(rows)}

    def _answers(self, state: dict[str, Any]) -> dict[str, Any]:
        """explanation and steady, with `age_s` of the instant since when it is."""
        holding = self._holding
        if holding is None or not state:
            return {"explanation": None, "steady": None}
        with self._lock:
            rows = [record for record in self._recent if record.scheduled_ns >= self.window.since_ns]
        names = ("layout", "model", "environment")
        about = {name: state.get(name) for name in names} | {"workload": holding.workload, "rate": holding.rate}
        found = self.answers.snapshot(rows, about)
        steady = found["steady"]
        if steady and steady["start_ns"] is not None:
            found = {**found, "steady": {**steady, "age_s": (time.monotonic_ns() - steady["start_ns"]) / 1e9}}
        return found

    def _verdicts(self, holding: Holding | None) -> list[Verdict]:
        at, found = self._quality
        if time.monotonic() - at > _QUALITY_EVERY_S:
            with self._lock:
                rows = list(self._recent)
            found = verdicts(rows, Window.of(rows), self._circumstances(holding)) if rows else []
            self._quality = (time.monotonic(), found)
        return found

    def _circumstances(self, holding: Holding | None) -> Circumstances:
        environment = (self.watch.state or {}).get("environment")
        return Circumstances(
            objective=self.objective,
            environment=msgspec.convert(environment, Environment) if environment else None,
            sharing_expected=holding.shares if holding else False,
            num_foreign=holding.lease.foreign_requests if holding and holding.lease else 0,
        )


def _check_rate(rate: float) -> None:
    if not 0 < rate <= 10_000:
        raise ValueError(f"The rate is {rate:g} requests/s; it must be above 0 and at most 10000.")
