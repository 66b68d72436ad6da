"""One run, from the lease to the stored summary: the driver sends, the event stream tells, the two are
joined.

Whatever ends a run (its schedule, Ctrl-C, a server that went away), what was measured until then is kept,
stored and says how it ended.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import msgspec

from labkit.cluster.engine_plan import EngineError
from labkit.lab.client_process import this_client
from labkit.lab.joining import Joiner
from labkit.lab.plan import RunPlan, new_run_id, utc_now
from labkit.lab.run import Run, open_store
from labkit.lab.summary import Setting, build_summary, setting_of
from labkit.load.driver import DriverError, DriverProcess, Driving
from labkit.load.report import LoadReport
from labkit.load.spec import RunSpec
from labkit.load.target import Target
from labkit.measure.quality import worst
from labkit.measure.records import RequestRecord, ServerTimes, StepRecord
from labkit.measure.window import SlidingWindow
from labkit.server.client import ServerClient, ServerError

Update = dict[str, Any]
OnUpdate = Callable[[Update], None]
UPDATE_S = 0.25
_SETTLE_S = 2.0
PROFILED = "A profiler ran on the ranks: latencies of this run are no figures, only its kernels are."


class Recording:
    """What a run has left so far. Its `on_…` methods run on the threads of the driver and of the stream."""

    def __init__(self, plan: RunPlan, run_id: str, on_update: OnUpdate | None = None) -> None:
        self.plan, self.run_id = plan, run_id
        self.records: list[RequestRecord] = []
        self.steps: list[StepRecord] = []
        self.notices: list[str] = []
        self.report: LoadReport | None = None
        self.stopped = False
        self.profiled: dict[int, int] = {}
        """By rank, how many of its steps were profiled."""
        self.error = ""
        self.joiner = Joiner(self._joined)
        self._window = SlidingWindow()
        self._on_update = on_update
        self._counts: dict[str, int] = {}
        self._start_ns = 0

    def _joined(self, record: RequestRecord) -> None:
        self.records.append(record)
        if self._on_update is not None:
            self._window.add(record)

    def on_event(self, event: dict[str, Any]) -> None:
        kind = event.pop("event")
        if kind == "request":
            self.joiner.add_times(msgspec.convert(event, ServerTimes))
        elif kind == "steps":
            self.steps += msgspec.convert(event["steps"], list[StepRecord])
        elif kind == "profile":
            self.profiled[event["rank"]] = event["num_steps"]
        elif kind == "failure":
            self.notices.append(f"Rank {event.get('rank')} failed during this run: {event.get('error')}")
        elif kind == "dropped":
            self.notices.append("This client read the event stream too slowly: some steps are missing.")

    def tell(self, phase: str, **more: Any) -> None:
        if self._on_update is None:
            return
        now = time.monotonic_ns()
        elapsed_s = (now - self._start_ns) / 1e9 if self._start_ns else 0.0
        self._on_update(
            {
                "phase": phase,
                "elapsed_s": max(0.0, elapsed_s),
                "expected_s": self.plan.expected_s,
                **self._counts,
                "figures": self._window.snapshot(now, self.plan.objective),
                **more,
            }
        )

    def drive(self, driver: DriverProcess, spec: RunSpec, check: Callable[[], None]) -> None:
        """Send the load; returns when it is over, was stopped by Ctrl-C, or `check` raised (a server that went)."""
        driving = driver.start(
            spec,
            self.joiner.add_records,
            on_start=self._started,
            on_progress=self._counts.update,
            keep_records=False,
        )
        try:
            self._follow(driving, check)
        except KeyboardInterrupt:
            self.stopped = True
            self.report = driver.stop()
        except (ServerError, DriverError, EngineError) as error:
            self.error = str(error)
            with contextlib.suppress(DriverError, TimeoutError):
                self.report = driver.stop()
        else:
            self.report = driving.report if driving.over else driver.stop()

    def _started(self, start_ns: int) -> None:
        self._start_ns = start_ns
        self._window.start(start_ns)

    def _follow(self, driving: Driving, check: Callable[[], None]) -> None:
        while not driving.over and not self._has_profiles:
            with contextlib.suppress(TimeoutError):
                driving.wait(UPDATE_S)
            check()
            self.tell("running")
        if driving.over:
            driving.wait(0)

    @property
    def _has_profiles(self) -> bool:
        """All that a run was for has come: it need not send more."""
        return self.plan.profile is not None and set(self.profiled) >= set(self.plan.profile.ranks)

    def settle(self) -> None:
        """Wait for the server's share of the last requests and for its last steps."""
        until = time.monotonic() + _SETTLE_S
        while self.joiner.num_waiting and time.monotonic() < until and not self.error:
            time.sleep(0.02)
        time.sleep(0.15)  # steps are told in batches of a tenth of a second
        self.joiner.expire(everything=True)

    @property
    def status(self) -> str:
        if self.error:
            return "failed"
        return "stopped" if self.stopped else "finished"


def run_on_lab(
    client: ServerClient, driver: DriverProcess, plan: RunPlan, on_update: OnUpdate | None = None
) -> Run:
    """Hold the ranks (waiting in line first), switch, send, measure, store.

    Raises ServerError when refused.
    """
    state = client.state()
    layout = plan.layout.slug if plan.layout else state["layout"]
    recording = Recording(plan, new_run_id(layout), on_update)
    driver.warm()
    with client.lease(
        recording.run_id,
        purpose=f"a run of {plan.workload_name} on {layout}",
        layout=layout,
        settings=plan.settings,
        expected_s=plan.expected_s,
        on_line=lambda line: recording.tell(line["lease"], **_of_queue(line)),
    ) as lease:
        kinds = ("request", "steps", "failure", "profile")
        with client.events(recording.on_event, kinds, run_id=recording.run_id):
            state = client.state()
            target = Target(url=client.url, token=client.token, model=state["model"], labkit=True)
            spec = plan.spec(target, recording.run_id, state["vocab_size"], state["max_model_len"])
            begin(recording, layout, state["model"], client.url)
            if plan.profile:
                client.profile(recording.run_id, plan.profile.ranks, plan.profile.skip, plan.profile.steps)
            recording.drive(driver, spec, lease.check)
            recording.settle()
            if not recording.error:
                state = client.state()
    where = setting_of(state, lease.switched, lease.foreign_requests)
    where.notices = recording.notices + (
        [lease.outcome["store_error"]] if lease.outcome.get("store_error") else []
    )
    return finish(recording, where)


def run_on_server(
    target: Target,
    driver: DriverProcess,
    plan: RunPlan,
    vocab_size: int,
    max_context: int | None = None,
    on_update: OnUpdate | None = None,
) -> Run:
    """The same load on any OpenAI-compatible server: what a user sees, without lease, steps or memory."""
    recording = Recording(plan, new_run_id("server"), on_update)
    begin(recording, None, target.model, target.url)
    recording.drive(driver, plan.spec(target, recording.run_id, vocab_size, max_context), lambda: None)
    recording.joiner.expire(everything=True)
    return finish(recording, Setting(model=target.model))


def _of_queue(line: dict[str, Any]) -> dict[str, Any]:
    return {name: line[name] for name in ("position", "eta_s", "message") if name in line}


def begin(recording: Recording, layout: str | None, model: str, url: str) -> None:
    """The run's row, before its first request: a run whose client is killed is found again by it (`client_process`)."""
    plan = recording.plan
    with open_store() as store:
        store.start_run(
            recording.run_id,
            started_at=utc_now(),
            layout=layout,
            model=model,
            workload=plan.workload_name,
            server_url=url,
            seed=plan.seed,
            rate=plan.rate,
            seconds=plan.measured_s,
            objective=plan.objective.to_dict(),
            environment=this_client(),
        )


def finish(recording: Recording, where: Setting) -> Run:
    """Sum up and store."""
    records = sorted(recording.records, key=lambda record: record.index)
    summary = build_summary(
        recording.plan,
        where,
        records,
        recording.steps,
        recording.report,
        run_id=recording.run_id,
        stopped_early=recording.stopped,
    )
    if recording.plan.profile:
        summary["profiled"] = {"ranks": list(recording.plan.profile.ranks), "steps": recording.profiled}
        summary["quality"].append({"code": "profiled", "severity": "bad", "sentence": PROFILED})
    if recording.error:
        summary["error"] = recording.error
        summary["quality"].append({"code": "failed", "severity": "bad", "sentence": recording.error})
    _store(recording, where, records, summary)
    recording.tell("over", status=recording.status, quality=worst(summary["quality"]))
    return Run(recording.run_id, summary, records, recording.steps, recording.status)


def _store(
    recording: Recording, where: Setting, records: list[RequestRecord], summary: dict[str, Any]
) -> None:
    environment = where.environment
    columns: dict[str, Any] = {}
    if environment is not None:
        names = ("backend", "fabric", "device", "dtype", "host", "num_cores", "threads_per_rank")
        columns = {name: getattr(environment, name) for name in names}
        columns["environment"] = msgspec.to_builtins(environment)
    with open_store() as store:
        store.add_requests(recording.run_id, records)
        store.finish_run(
            recording.run_id,
            recording.status,
            finished_at=utc_now(),
            num_ranks=summary["num_ranks"],
            rate=summary["rate"],
            window_start_ns=summary["window"]["start_ns"],
            window_end_ns=summary["window"]["end_ns"],
            settings=where.settings,
            summary=summary,
            quality=summary["quality"],
            error=recording.error,
            **columns,
        )
