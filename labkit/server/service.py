"""The engine with its surroundings: what the HTTP handlers ask, and the one place through which every event passes.

An event of the engine is stamped with the run that holds the ranks, recorded, counted and published here. Requests in
flight are known by run, so that a run that ends takes its requests with it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from labkit.engine.messages import Fault
from labkit.engine.request import Request, RequestRefused, SamplingParams
from labkit.engine.stream import EngineDown
from labkit.measure.timeline import TimelineTeller
from labkit.server.errors import ApiError
from labkit.server.events import EventHub
from labkit.server.fabric import FabricBench
from labkit.server.picture import Picture
from labkit.server.profiling import Profiling
from labkit.server.prom import Metrics
from labkit.server.recording import RunRecorder
from labkit.server.session import Session, Ticket
from labkit.server.settings import changed_settings

if TYPE_CHECKING:
    from pathlib import Path

    from labkit.engine.core import Engine, SwitchReport
    from labkit.engine.stream import RequestStream
    from labkit.model.spec import ModelSpec
    from labkit.model.tokenizer import Tokenizer

PROBE_TOKENS = 128


@dataclass(frozen=True)
class ServedModel:
    """What is served, and under which names."""

    name: str
    folder: Path
    spec: ModelSpec
    tokenizer: Tokenizer
    max_len: int
    """Prompt plus answer, in tokens."""
    created: int = field(default_factory=lambda: int(time.time()))


class Service:
    """Made before the engine, which is given `on_event` to speak to; `attach` closes the circle."""

    def __init__(self, model: ServedModel, picture: Picture, recorder: RunRecorder) -> None:
        self.model = model
        self.hub = EventHub()
        self.session = Session(self._session_changed)
        self.recorder = recorder
        self.profiling = Profiling()
        self.fabric = FabricBench(self)
        self._timeline = TimelineTeller()
        self.telemetry_source = ""
        """nvml or psutil; empty where nothing is sampled."""
        self.metrics = Metrics(lambda: self.state_of_engine().get("replicas", []))
        self.links: list[dict[str, Any]] = []
        self._picture = picture
        self._engine: Engine | None = None
        self._started = asyncio.Event()
        self._start_error = ""
        self._in_flight: dict[str, str] = {}

    # ---- life

    def attach(self, engine: Engine) -> None:
        self._engine = engine

    def started(self, error: str = "") -> None:
        """The first start is over: well, or with this sentence."""
        self._start_error = error
        self._started.set()
        self.publish_state()

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "attach() comes before the first request"
        return self._engine

    async def until_started(self) -> None:
        """The first start is over, well or not: a switch may mend what it was refused for."""
        await self._started.wait()

    async def until_ready(self) -> None:
        """Requests may come before the ranks have started: they wait. Raises ApiError 503."""
        await self.until_started()
        if self._start_error:
            raise ApiError(503, self._start_error)

    # ---- requests

    def check_model(self, name: str | None) -> None:
        if name and name not in (self.model.name, str(self.model.folder)):
            raise ApiError(404, f"There is no model {name!r} here; this server has {self.model.name!r}.", "model")

    def submit(self, request: Request) -> RequestStream:
        """Raises ApiError 400, 409 or 503. Give every submitted request to `done` afterwards."""
        self._check_request(request)
        try:
            stream = self.engine.submit(request)
        except RequestRefused as error:
            raise ApiError(400, str(error)) from error
        except EngineDown as error:
            raise ApiError(503, str(error)) from error
        self._in_flight[request.id] = request.run_id
        self.session.note_request(request.run_id)
        return stream

    def _check_request(self, request: Request) -> None:
        if request.id in self._in_flight:
            raise ApiError(400, f"A request with the id {request.id!r} is already in flight.")
        if request.run_id and self.session.has_ended(request.run_id):
            raise ApiError(409, f"The run {request.run_id} has ended: its lease is closed.")
        num_prompt, max_tokens = len(request.prompt), request.params.max_tokens
        if num_prompt + max_tokens > self.model.max_len:
            raise ApiError(
                400,
                f"The context of {self.model.name} is {self.model.max_len} tokens, and the request asks for "
                f"{num_prompt} of prompt plus {max_tokens} of answer: shorten the prompt or lower max_tokens.",
            )

    def done(self, request: Request) -> None:
        """The answer is over, or nobody reads it any more: whatever still runs of it is cancelled."""
        if self._in_flight.pop(request.id, None) is not None and request.finish_reason is None:
            self.engine.cancel(request.id)

    # ---- leases and switches

    async def switch(self, layout: str, changes: dict[str, Any]) -> SwitchReport:
        """Also the way out of a first start that was refused. ApiError 400 (what was asked is not legal) or 503."""
        await self.until_started()
        settings = self.plan_switch(layout, changes)
        try:
            report = await self.engine.switch(settings)
            self._start_error = ""
            return report
        except EngineDown as error:
            raise ApiError(503, str(error)) from error
        except ValueError as error:
            raise ApiError(400, str(error)) from error

    async def stands_as(self, layout: str, changes: dict[str, Any]) -> bool:
        """Whether that is what the ranks are already, once they have started. Raises ApiError 400."""
        await self.until_started()
        return not self._start_error and self.plan_switch(layout, changes) == self.engine.settings

    def plan_switch(self, layout: str, changes: dict[str, Any]) -> Any:
        """The settings that a switch would lead to (EngineSettings). Raises ApiError 400."""
        return changed_settings(self.engine.settings, layout, changes, self.model.spec, self._picture.num_ranks)

    async def first_token_s(self) -> float:
        """How long one greedy request of 128 prompt tokens takes to its first token, right now."""
        prompt = tuple(secrets.randbelow(min(256, self.model.spec.vocab_size)) for _ in range(PROBE_TOKENS))
        prompt = prompt[: max(1, self.model.max_len - 1)]
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        begin_ns = time.monotonic_ns()
        request = Request(f"probe-{secrets.token_hex(4)}", prompt, params, begin_ns, run_id="probe")
        async for _ in self.engine.submit(request):
            break
        return (time.monotonic_ns() - begin_ns) / 1e9

    def begin_run(self, ticket: Ticket) -> None:
        memory = self._picture.memory(self.state_of_engine())
        self.recorder.begin(ticket.run_id, memory, self.engine.last_step_id)

    async def end_run(self, ticket: Ticket) -> None:
        """Cancel what the run still has in flight, write its record, give the ranks to the next."""
        try:
            if ticket.run_id:
                self.cancel_run(ticket.run_id)
            if ticket.run_id and self.recorder.run_id == ticket.run_id:
                await self.engine.settle()
                await self.profiling.end(self.engine)
                await self.recorder.end()
        finally:
            self.session.leave(ticket)

    def cancel_run(self, run_id: str) -> None:
        for request_id, owner in list(self._in_flight.items()):
            if owner == run_id:
                self.engine.cancel(request_id)

    def inject(self, rank: int, kind: str, seconds: float, layer: int) -> None:
        """A drill: make one rank fail. `kill` is the operating system's SIGKILL; the rank itself does the others."""
        pool = self.engine.pool
        if kind != "kill" or pool.config.join is not None:  # a process id of another machine means nothing here
            pool.send(rank, Fault(kind, seconds, layer))
        elif rank in pool.pids:
            os.kill(pool.pids[rank], signal.SIGKILL)

    # ---- what is told

    def on_event(self, event: dict[str, Any]) -> None:
        """The engine's `emit`. Called between steps: cheap, and never waits."""
        kind = event["event"]
        handler = getattr(self, f"_on_{kind}", None)
        if handler is not None:
            handler(event)
        else:
            self.hub.publish(event)

    def _on_state(self, _: dict[str, Any]) -> None:
        self.publish_state()

    def _on_request(self, event: dict[str, Any]) -> None:
        self.metrics.observe(event)
        self.hub.publish(event)

    def _on_steps(self, event: dict[str, Any]) -> None:
        for step in event["steps"]:
            step.run_id = self.recorder.run_id
        self.recorder.add_steps(event["steps"])
        self.hub.publish(event)
        if self.hub.wants("timeline"):
            told = self._timeline.add_steps(event["steps"], time.monotonic_ns())
            if told is not None:
                self.hub.publish({"event": "timeline", **told})

    def _on_collectives(self, event: dict[str, Any]) -> None:
        self.recorder.add_collectives(event["rows"])
        if self.hub.wants("timeline"):
            self._timeline.add_rows(event["rows"])

    def _on_memory(self, event: dict[str, Any]) -> None:
        self.recorder.add_memory(self._picture.memory(self.state_of_engine()))
        self.hub.publish(event)

    def _on_profile(self, event: dict[str, Any]) -> None:
        """The trace goes to the run's folder, and word of it to whoever watches."""
        trace, run_id = event.pop("trace"), self.recorder.run_id
        self.recorder.add_profile(event["rank"], trace, event.pop("offset_ns", 0))
        self.profiling.came(event["rank"])
        self.hub.publish({**event, "run_id": run_id, "bytes": len(trace)})

    @property
    def wants_telemetry(self) -> bool:
        """A run is recorded, or somebody watches."""
        return bool(self.recorder.run_id) or self.hub.wants("telemetry")

    def _on_telemetry(self, event: dict[str, Any]) -> None:
        self.recorder.add_telemetry(event["samples"])
        self.hub.publish(event)

    def _session_changed(self) -> None:
        holder = self.session.holder.describe() if self.session.holder else None
        self.hub.publish({"event": "lease", "holder": holder, "queue": self.session.describe_queue()})

    def publish_state(self) -> None:
        if self.hub.num_subscribers:
            self.hub.publish({"event": "state", **self.state()})

    def state_of_engine(self) -> dict[str, Any]:
        return self._engine.state() if self._engine is not None else {}

    def state_of_health(self) -> str:
        """starting, ready, switching, restarting, failed …"""
        if self._start_error:
            return "failed"
        return str(self.state_of_engine().get("state", "starting")) if self._started.is_set() else "starting"

    @property
    def choices(self) -> dict[str, Any]:
        return self._picture.choices

    def state(self) -> dict[str, Any]:
        """The whole of GET /lab/state."""
        engine = self.state_of_engine()
        state = {
            **self._picture.of(engine, self.engine.settings if self._engine else None),
            "state": self.state_of_health(),
            "model": self.model.name,
            "max_model_len": self.model.max_len,
            "vocab_size": self.model.spec.vocab_size,
            "holder": self.session.holder.describe() if self.session.holder else None,
            "queue": self.session.describe_queue(),
            "requests_in_flight": len(self._in_flight),
            "links": self.links,
            "telemetry": self.telemetry_source,
        }
        if self._start_error:
            state["message"] = self._start_error
        return state
