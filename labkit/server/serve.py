"""The lab server's process: one event loop that holds the web application, the engine and the pool of ranks.

It listens first and says where in one line of JSON; the ranks start meanwhile and requests wait for them. Whatever
ends it (a signal, /lab/shutdown, nobody there for ten minutes), it ends the ranks and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import os
import shutil
import signal
import sys
from typing import Any

from aiohttp import web

from labkit.cluster.pool import Pool, PoolConfig, default_run_dir
from labkit.engine.core import Engine
from labkit.engine.messages import RankMessage
from labkit.paths import home_dir, runtime_dir
from labkit.server import discovery
from labkit.server.app import make_app
from labkit.server.lifetime import Lifetime
from labkit.server.options import ServePlan
from labkit.server.picture import Picture
from labkit.server.placing import invitation
from labkit.server.recording import RunRecorder
from labkit.server.service import Service
from labkit.server.telemetry import Telemetry

END_S = 20.0
"""How long the ranks are given to end before the process ends anyway (their lifelines then close with it)."""


def serve(plan: ServePlan) -> None:
    """Runs until the server ends."""
    asyncio.run(_Server(plan).run())


class _Server:
    def __init__(self, plan: ServePlan) -> None:
        self._plan = plan
        self._stop = asyncio.Event()
        self._why = ""
        picture = Picture(
            plan.model.spec, plan.num_ranks, plan.threads, plan.device, plan.backend, plan.placing.describe()
        )
        self._recorder = RunRecorder(home_dir() / "store.sqlite")
        self._service = Service(plan.model, picture, self._recorder)
        self._pool = Pool(self._pool_config(), self._on_message, self._on_failure, self._on_pool_state)
        self._engine = Engine(
            self._pool, str(plan.model.folder), plan.model.spec, self._service.on_event,
            step_timeout_s=plan.step_timeout_s,
        )  # fmt: skip
        self._service.attach(self._engine)
        self._lifetime = Lifetime(plan.linger_s, lambda: self.end(f"nobody came for {plan.linger_s:g} s"))

    def _pool_config(self) -> PoolConfig:
        plan = self._plan
        run_dir = default_run_dir(runtime_dir())
        return PoolConfig(plan.num_ranks, plan.threads, plan.device, plan.backend, run_dir,
                          nodes=plan.placing.nodes, join=plan.placing.join)  # fmt: skip

    def end(self, why: str) -> None:
        self._why = self._why or why
        self._stop.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.end, signal.Signals(number).name)
        app = make_app(self._service, self._plan.token, self._lifetime, self._stop, self._plan.allowed_hosts)
        # a client that goes away cancels its handler: that is what frees the blocks of an abandoned request
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await self._run_with(runner)
        finally:
            await runner.cleanup()
            self._recorder.close()

    async def _run_with(self, runner: web.AppRunner) -> None:
        url = await self._listen(runner)
        starting = asyncio.create_task(self._start_engine())
        self._lifetime.start()
        telemetry = Telemetry(self._service, lambda: self._pool.pids)
        telemetry.start()
        try:
            await self._stop.wait()
            _say(f"ending: {self._why or 'asked to'}")
        finally:
            discovery.unregister(url)
            telemetry.stop()
            await self._end_engine(starting)

    async def _listen(self, runner: web.AppRunner) -> str:
        plan = self._plan
        try:
            await web.TCPSite(runner, plan.host, plan.port).start()
        except OSError as error:
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had ({error.strerror})"
            raise OSError(
                f"--port {plan.port} on {plan.host} {why}: give another one, or 0 for any that is free."
            ) from error
        port = runner.addresses[0][1]
        host = "127.0.0.1" if plan.host in ("0.0.0.0", "localhost") else plan.host
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        me = discovery.Found(url, plan.token, os.getpid(), plan.model.name, plan.num_ranks)
        other = discovery.register(me)
        print(json.dumps({"url": url, "token": plan.token}), flush=True)
        if other is not None:
            _say(f"another lab server is at {other.url} and stays the one that is found; reach this one by its URL")
        _say(f"open {url}/?token={plan.token}")
        return url

    # ---- the engine's life

    async def _start_engine(self) -> None:
        plan = self._plan
        self._say_where_ranks_come_from()
        try:
            await self._engine.start(plan.settings)
        except Exception as error:  # whatever it was, whoever asks shall read it
            _say(f"the engine did not start: {error}")
            self._service.started(str(error))
            return
        # what lives now lives long: no collection should walk it again between two steps
        gc.collect()
        gc.freeze()
        self._service.started()
        _say(f"ready: {plan.model.name} as {plan.settings.layout}")

    def _say_where_ranks_come_from(self) -> None:
        plan, placing = self._plan, self._plan.placing
        if placing.join:
            placing.join.token()
            for line in invitation(placing.join, plan.num_ranks, plan.device):
                _say(line)
            return
        where = f", on {placing.nodes.num_nodes} nodes joined by {placing.nodes.link} links" if placing.nodes else ""
        _say(f"starting {plan.num_ranks} ranks on {plan.device}, {plan.threads} threads each{where}")

    async def _end_engine(self, starting: asyncio.Task[None]) -> None:
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        try:
            async with asyncio.timeout(END_S):
                await self._engine.stop()
        except TimeoutError:
            _say(f"the ranks did not end within {END_S:g} s; they end with this process")
        shutil.rmtree(self._pool.config.run_dir, ignore_errors=True)  # logs of ranks that failed, by now told

    # ---- what the pool tells

    def _on_message(self, rank: int, message: RankMessage) -> None:
        self._engine.on_message(rank, message)

    def _on_failure(self, failure: Any) -> None:
        _say(f"{failure.error}")
        self._engine.on_failure(failure)

    def _on_pool_state(self, state: str) -> None:
        _say(f"ranks: {state} ({self._pool.progress})")
        self._engine.on_pool_state(state)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads any more: not a reason to stop serving
        print(f"labkit: {line}", file=sys.stderr, flush=True)
