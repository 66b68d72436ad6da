"""An engine without ranks, for what is HTTP's business alone: it answers each request with tokens that the test wrote.

Streams, settings and refusals are the real classes; only the scheduling and the computing are missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiohttp import web

from labkit.engine.bench_messages import Benched, BenchLink
from labkit.engine.bringup import SwitchReport
from labkit.engine.measuring import refuse_if_busy
from labkit.engine.request import FinishReason, Request, RequestRefused
from labkit.engine.settings import EngineSettings
from labkit.engine.stream import EngineDown, RequestStream
from labkit.layout.fabrics import group_fabrics
from labkit.model.spec import load_spec, model_dir
from labkit.model.tokenizer import ByteTokenizer
from labkit.server.app import make_app
from labkit.server.client import ServerClient
from labkit.server.lifetime import Lifetime
from labkit.server.picture import Picture
from labkit.server.recording import RunRecorder
from labkit.server.service import ServedModel, Service

TOKEN = "s3cret"


@dataclass
class Script:
    """What the next requests are answered with."""

    token_ids: list[int] = field(default_factory=lambda: list(b"hello world"))
    end: FinishReason | None = None
    """How the engine ends the answer; None: by max_tokens."""
    break_after: int = -1
    """Tokens after which the engine goes down."""
    refuse: str = ""
    down: str = ""
    hold: bool = False
    """Give no token at all until the test says `go`."""
    delay_s: float = 0.0


class EngineDouble:
    last_step_id = 0

    def __init__(self, emit: Any) -> None:
        self.settings = EngineSettings()
        self.script = Script()
        self.submitted: list[Request] = []
        self.cancelled: list[str] = []
        self.finished: list[str] = []
        self.switched: list[EngineSettings] = []
        self.switch_error: Exception | None = None
        self.pool = SimpleNamespace(
            pids={0: 0}, send=lambda rank, message: self.faults.append((rank, message)), state="ready", hellos={},
            config=SimpleNamespace(device="cpu", threads=1, join=None),
        )  # fmt: skip
        self.faults: list[Any] = []
        self.emit = emit
        self._streams: dict[str, RequestStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, request: Request) -> RequestStream:
        if self.script.refuse:
            raise RequestRefused(self.script.refuse)
        if self.script.down:
            raise EngineDown(self.script.down)
        self.submitted.append(request)
        stream = self._streams[request.id] = RequestStream(request)
        task = asyncio.get_running_loop().create_task(self._play(stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    async def _play(self, stream: RequestStream) -> None:
        script, request = self.script, stream.request
        wanted = request.params.logprobs
        shown = [script.token_ids[i % len(script.token_ids)] for i in range(request.params.max_tokens)]
        if script.end is not None:
            shown = shown[: len(script.token_ids)]
        for index, token_id in enumerate(shown):
            while script.hold:
                await asyncio.sleep(0.005)
            if index == script.break_after:
                stream.fail(EngineDown("Rank 1 was killed (SIGKILL)."))
                return
            await asyncio.sleep(script.delay_s)
            if request.finish_reason is not None:
                return
            last = index == len(shown) - 1
            reason = (script.end or FinishReason.LENGTH) if last else None
            request.output.append(token_id)
            request.finish_reason = reason
            logprob = None if wanted is None else (-0.5, [(token_id, -0.5), (65, -1.5)][:wanted])
            stream.push(token_id, logprob, reason)

    def _end(self, request_id: str, reason: FinishReason) -> None:
        stream = self._streams[request_id]
        stream.request.finish_reason = reason
        stream.end(reason)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        self._end(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, reason: FinishReason) -> None:
        self.finished.append(request_id)
        self._end(request_id, reason)

    async def settle(self) -> None:
        """There are no figures of steps here."""

    async def switch(self, settings: EngineSettings) -> SwitchReport:
        await asyncio.sleep(self.script.delay_s)
        if self.switch_error is not None:
            raise self.switch_error
        self.settings = settings
        self.switched.append(settings)
        self.emit({"event": "switch", "layout": settings.layout.slug, "name": str(settings.layout), "ready_s": 0.1})
        return SwitchReport(settings.layout, 0.1, {"load": 0.05})

    @contextlib.asynccontextmanager
    async def measuring(self) -> AsyncIterator[Any]:
        """Two ranks between which every message takes a microsecond and a nanosecond a byte."""
        refuse_if_busy(self._num_running)
        yield SimpleNamespace(ask=self._measured, epoch=1)

    @property
    def _num_running(self) -> int:
        return sum(stream.request.finish_reason is None for stream in self._streams.values())

    async def _measured(self, message: BenchLink) -> dict[int, Benched]:
        await asyncio.sleep(self.script.delay_s)
        if self.script.down:
            raise EngineDown(self.script.down)
        times = [1000 + message.num_bytes] * message.num_rounds
        return {rank: Benched(1, rank, times if rank in message.ranks else [], 0) for rank in (0, 1)}

    def state(self) -> dict[str, Any]:
        replica = {"waiting": 1, "running": 2, "kv_used_blocks": 25, "kv_total_blocks": 100, "ranks": [0]}
        groups = [vars(group) for group in group_fabrics(self.settings.layout, self.settings.fabric, [])]
        return {
            "state": "ready", "message": "", "memory": [], "replicas": [replica], "failure": None, "groups": groups,
            "requests_in_flight": self._num_running,
        }  # fmt: skip


class Double:
    """The application on a port of its own, in a thread; `engine.script` says what it answers."""

    def __init__(self, folder: Path, linger_s: float = 0.0, num_ranks: int = 2) -> None:
        self.folder, self.linger_s, self.num_ranks = folder, linger_s, num_ranks
        self.ended = threading.Event()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._listening.wait(10)
        self.client = ServerClient(self.url, TOKEN)

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        spec = load_spec("lab-5m")
        model = ServedModel("lab-5m", model_dir("lab-5m"), spec, ByteTokenizer(spec.vocab_size), 512)
        picture = Picture(spec, self.num_ranks, 1, "cpu", "gloo")
        self.service = Service(model, picture, RunRecorder(self.folder / "store.sqlite"))
        self.engine = EngineDouble(self.service.on_event)
        self.service.attach(self.engine)  # type: ignore[arg-type]
        self.service.started()
        self.stop = asyncio.Event()
        lifetime = Lifetime(self.linger_s, self.stop.set)
        app = make_app(self.service, TOKEN, lifetime, self.stop, {"lab.example"})
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.2)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        lifetime.start()
        self._listening.set()
        await self.stop.wait()
        await runner.cleanup()
        self.service.recorder.close()
        self.ended.set()

    def close(self) -> None:
        if not self.ended.is_set():
            self.loop.call_soon_threadsafe(self.stop.set)
        self._thread.join(10)

    # ---- raw HTTP, so that a test sees what a foreign client would

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status, and the body: parsed when it is JSON."""
        with self.open(method, path, body, headers) as response:
            data = response.read()
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, json.loads(data) if is_json else data

    @contextlib.contextmanager
    def open(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=10)
        sent = {"Authorization": f"Bearer {TOKEN}"} | (headers or {})
        connection.request(method, path, body if isinstance(body, bytes) else json.dumps(body), sent)
        with contextlib.closing(connection):
            yield connection.getresponse()

    def stream(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> list[Any]:
        """The SSE events of a streamed answer, "[DONE]" as text."""
        status, data = self.ask("POST", path, {**body, "stream": True}, headers)
        assert status == 200, data
        return parse_events(data)


def parse_events(data: bytes) -> list[Any]:
    events = []
    for block in data.decode().split("\n\n"):
        if block:
            assert block.startswith("data: "), block
            text = block.removeprefix("data: ")
            events.append(text if text == "[DONE]" else json.loads(text))
    return events


# ---- what several test files ask


def completion(double: Double, **fields: Any) -> dict[str, Any]:
    status, body = double.ask("POST", "/v1/completions", {"model": "lab-5m", "prompt": "hi", **fields})
    assert status == 200, body
    return body


def refusal(double: Double, path: str = "/v1/completions", **fields: Any) -> tuple[int, str]:
    status, body = double.ask("POST", path, fields)
    assert list(body) == ["error"] and body["error"]["code"] == status
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return status, body["error"]["message"]


def wait_until(holds: Any, timeout_s: float = 3.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < give_up, "it did not come about"
        time.sleep(0.005)
