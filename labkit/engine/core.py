"""The engine: one thread without a tensor, between whoever asks and the ranks that compute.

It has a layout standing, or is between two. A switch stops planning, waits for the steps in flight, gives
the living ranks the new layout, and computes again what was in flight. When a rank ends, every stream fails
with a sentence that names it, the pool starts anew, and the same settings are applied to it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from labkit.engine.accounts import Accounts
from labkit.engine.admission import check_request
from labkit.engine.assemble import assemble
from labkit.engine.bench_messages import Benched
from labkit.engine.bringup import BringUp, Standing, SwitchRefused, SwitchReport
from labkit.engine.dispatcher import Dispatcher
from labkit.engine.expert_load import ExpertLoad, placements_for
from labkit.engine.flights import Flights
from labkit.engine.measuring import Lender, Measuring
from labkit.engine.messages import Configured, Hello, Moved, Profiled, RankMessage, Ready, Sampled, StepStats
from labkit.engine.places import describe_places, nodes_of, share_a_clock
from labkit.engine.reporter import Emit, Reporter
from labkit.engine.request import FinishReason, Request, RequestRefused
from labkit.engine.settings import EngineSettings
from labkit.engine.stream import EngineDown, Output, RequestStream
from labkit.engine.watchdog import STEP_TIMEOUT_S
from labkit.layout import require_deployable
from labkit.model.spec import ModelSpec

if TYPE_CHECKING:
    from labkit.cluster.pool import Pool, PoolFailure

__all__ = ["Engine", "EngineDown", "EngineSettings", "Output", "RequestStream", "SwitchRefused", "SwitchReport"]


class Engine:
    """`emit` gets every event, a dict with "event". Give `on_message` and `on_failure` to the pool.

    step_timeout_s: a rank that has not answered a step for so long counts as hung, and the pool as failed.
    check: walk all of the block pools after every step, for tests.
    """

    def __init__(
        self, pool: Pool, model: str, spec: ModelSpec, emit: Emit,
        *, step_timeout_s: float = STEP_TIMEOUT_S, check: bool = False,
    ) -> None:  # fmt: skip
        self.pool, self.model, self.spec, self._emit = pool, model, spec, emit
        self.settings = EngineSettings()
        """Those that stand; before the first start and after a refusal of it, those that were asked for."""
        self._standing: Standing | None = None
        self._state, self._message = "stopped", ""
        self._failure: dict[str, Any] | None = None
        self._epoch = 0
        self._reporter = Reporter(emit, lambda: self._dispatcher.describe())
        accounts = Accounts(self._reporter.request)
        self._flights = Flights(accounts, self._reporter, shared_clock=True)
        self._dispatcher = Dispatcher(
            pool.send_many, self._reporter, accounts, self._flights,
            lambda ranks, what: pool.declare_hung(ranks, what, step_timeout_s),
            step_timeout_s=step_timeout_s, check=check,
        )  # fmt: skip
        self._expert_load = self._flights.expert_load = ExpertLoad(spec) if spec.moe else None
        self._bring_up: BringUp | None = None
        self._lender = Lender(pool, self._dispatcher)
        self._one_at_a_time = asyncio.Lock()
        self._tasks: set[asyncio.Task[SwitchReport]] = set()
        self._recovery: asyncio.Task[None] | None = None
        self._is_stopping = False

    # ---- requests

    def submit(self, request: Request) -> RequestStream:
        """Its stream. While the engine starts or switches, the request waits for it.

        Raises RequestRefused for what can never be served, EngineDown when there are no ranks to serve it.
        """
        if self._state not in ("ready", "starting", "switching"):
            raise EngineDown(self._message or f"The engine is {self._state}.")
        check_request(request, self.spec.max_positions, self.spec.vocab_size)
        if request.id in self._dispatcher:
            raise RequestRefused(f"A request with the id {request.id!r} is in flight. Choose another id.")
        seed = request.params.seed
        request.seed = random.getrandbits(62) if seed is None else seed & (2**62 - 1)
        return self._dispatcher.submit(request)

    def cancel(self, request_id: str) -> None:
        self._dispatcher.end(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, reason: FinishReason = FinishReason.STOP) -> None:
        """End a request whose answer is complete, as when the server found a stop string in it."""
        self._dispatcher.end(request_id, reason)

    # ---- what ranks say

    def on_message(self, rank: int, message: RankMessage) -> None:
        if isinstance(message, Sampled):
            self._dispatcher.sampled(message)
        elif isinstance(message, StepStats):
            self._flights.stats(message)
        elif isinstance(message, Moved):
            self._dispatcher.moved(message)
        elif isinstance(message, Profiled):
            self._reporter.profiled(message)
        elif isinstance(message, Benched):
            self._lender.add(rank, message)
        elif isinstance(message, Configured | Ready) and self._bring_up is not None:
            self._bring_up.add(rank, message)

    def on_failure(self, failure: PoolFailure) -> None:
        """A rank has ended: everybody is told, and the pool comes back."""
        sentence = f"{failure.error[:1].upper()}{failure.error[1:].rstrip('.')}."
        self._failure = {"rank": failure.rank, "error": sentence, "traceback": failure.traceback}
        self._emit({"event": "failure", "kind": failure.kind, **self._failure})
        error = EngineDown(sentence)
        self._standing = None
        self._dispatcher.fail(error)
        self._set_state("failed", sentence)
        self._lender.fail(error)
        if self._bring_up is not None:
            self._bring_up.fail(error)
        if not self._is_stopping and (self._recovery is None or self._recovery.done()):
            self._recovery = asyncio.get_running_loop().create_task(self._recover())

    def on_pool_state(self, state: str) -> None:
        """The pool's own progress, shown beside the engine's state."""
        if self._state in ("starting", "restarting"):
            self._set_state(self._state, f"{self._why_failed()} The ranks are {state}.".strip())

    # ---- life

    async def start(self, settings: EngineSettings) -> SwitchReport:
        """Start the pool if need be and give it its first layout. Raises as `switch` does."""
        require_deployable(settings.layout, self.spec, self.pool.config.num_ranks, engine=True)
        self.settings = settings
        self._set_state("starting")
        if self.pool.state != "ready":
            await self._start_pool()
        return await self._detached(self._first(settings))

    async def _start_pool(self) -> None:
        try:
            await self.pool.start()
        except Exception as error:
            self._dispatcher.fail(EngineDown(str(error)))
            self._set_state("stopped", str(error))
            raise

    async def _first(self, settings: EngineSettings) -> SwitchReport:
        try:
            return await self._switch(settings, "starting")
        except EngineDown:
            if self._recovery is None:
                raise
            await self._recovery
            if self._state != "ready":
                raise EngineDown(self._message) from None
            return SwitchReport(settings.layout, 0.0, {})

    async def switch(self, settings: EngineSettings) -> SwitchReport:
        """Give the living ranks another layout, or other settings. Requests in flight are computed again.

        Raises LayoutError or SwitchRefused (both ValueError; what stood before stands again), EngineDown.
        """
        require_deployable(settings.layout, self.spec, self.pool.config.num_ranks, engine=True)
        return await self._detached(self._switch(settings, "switching"))

    async def _detached(self, work: Coroutine[Any, Any, SwitchReport]) -> SwitchReport:
        """Whoever asked for a switch may go away in the middle of it; the ranks may not be left there."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _switch(self, settings: EngineSettings, state: str) -> SwitchReport:
        async with self._one_at_a_time:
            if self.pool.state != "ready":
                raise EngineDown(self._message or f"The ranks are {self.pool.state}.")
            began = time.perf_counter()
            self._set_state(state, f"{settings.layout} is being set up.")
            await self._dispatcher.close()
            drain_s = time.perf_counter() - began
            previous = self.settings if self._standing is not None else None
            try:
                standing = await self._stand(settings)
            except SwitchRefused as refusal:
                await self._fall_back(previous, refusal)
                raise
            ready_s = time.perf_counter() - began
        self._emit(
            {
                "event": "switch",
                "layout": settings.layout.slug,
                "name": str(settings.layout),
                "ready_s": ready_s,
            }
        )
        return SwitchReport(settings.layout, ready_s, {"drain": drain_s, **standing.parts})

    async def _fall_back(self, previous: EngineSettings | None, refusal: SwitchRefused) -> None:
        if previous is not None:
            await self._stand(previous)
            return
        self._dispatcher.fail(EngineDown(str(refusal)))
        self._set_state("failed", str(refusal))

    async def _stand(self, settings: EngineSettings) -> Standing:
        """All ranks take the settings; requests flow again. Raises SwitchRefused, EngineDown."""
        self._epoch += 1
        config = self.pool.config
        hellos = self.pool.hellos
        self._flights.shared_clock = share_a_clock(hellos, config.device)
        placements = placements_for(self._expert_load, settings)
        self._bring_up = BringUp(
            self.pool, config.num_ranks, self.spec, settings, self._epoch, nodes_of(hellos), placements
        )
        try:
            standing = await self._bring_up.run(self.model, config.threads)
        finally:
            self._bring_up = None
        self.settings, self._standing, self._failure = settings, standing, None
        if self._expert_load is not None:
            self._expert_load.begin(settings.layout, placements)
        self._dispatcher.open(
            assemble(settings, self.spec, standing), self._epoch, settings.layout.slug,
            settings.first_token == "decode",
        )  # fmt: skip
        self._set_state("ready")
        self._reporter.memory(standing.memory)
        return standing

    @asynccontextmanager
    async def measuring(self) -> AsyncIterator[Measuring]:
        """The warm ranks, for questions of one's own; the layout stands on, and requests wait until the end.

        Raises EngineBusy while requests run, EngineDown when there are no ranks; EngineBusy too once one has come.
        """
        async with self._one_at_a_time:
            if self._standing is None or self.pool.state != "ready":
                raise EngineDown(self._message or f"The engine is {self._state}.")
            async with self._lender.lend(self._epoch, lambda: self._standing is not None) as ranks:
                yield ranks

    async def _recover(self) -> None:
        async with self._one_at_a_time:
            while not self._is_stopping:
                self._set_state("restarting", self._why_failed())
                try:
                    await self.pool.restart()
                    await self._stand(self.settings)
                    return
                except EngineDown:
                    continue  # a rank ended again meanwhile; the pool counts how often
                except Exception as error:
                    if isinstance(error, SwitchRefused) or self.pool.restarts_left <= 0:
                        self._set_state("stopped", f"{self._why_failed()} {error}".strip())
                        return

    @property
    def last_step_id(self) -> int:
        """Of the steps sent so far."""
        return self._dispatcher.last_step_id

    async def settle(self, timeout_s: float = 0.3) -> None:
        """Wait, a little, for the figures of the steps that have run, and tell them: a run is about to close."""
        give_up = time.monotonic() + timeout_s
        while self._flights.by_step and time.monotonic() < give_up:
            await asyncio.sleep(0.005)
        self._reporter.flush()

    async def stop(self) -> None:
        """End every request and every rank."""
        self._is_stopping = True
        stopped = EngineDown("The engine was stopped.")
        self._dispatcher.fail(stopped)
        self._lender.fail(stopped)
        if self._recovery is not None:
            self._recovery.cancel()
        self._reporter.flush()
        await self.pool.stop()
        self._set_state("stopped")

    # ---- what others may know

    def _set_state(self, state: str, message: str = "") -> None:
        self._state, self._message = state, message
        self._emit({"event": "state", **self.state()})

    def state(self) -> dict[str, Any]:
        """The engine's part of GET /lab/state. `memory` is a list of MemoryRecord."""
        settings, layout, hello = self.settings, self.settings.layout, self._any_hello()
        return {
            "state": self._state,
            "message": self._message,
            "layout": layout.slug,
            "layout_name": str(layout),
            "epoch": self._epoch,
            "fabric": settings.fabric,
            "dtype": settings.dtype,
            "memory_per_rank": settings.memory_per_rank,
            "memory": self._standing.memory if self._standing else [],
            "device": hello.device if hello else "",
            "versions": hello.versions if hello else {},
            "failure": self._failure,
            "restarts_left": self.pool.restarts_left,
            "replicas": self._dispatcher.describe(),
            "pools": self._dispatcher.describe_pools(),
            "settings": settings.to_dict(),
            "requests_in_flight": self._dispatcher.num_requests,
            "experts": self._expert_load.describe() if self._expert_load else None,
            "clocks": self.pool.clocks,
            **describe_places(self.pool.hellos, self.pool.config.device, layout, settings.fabric),
        }

    def _why_failed(self) -> str:
        return str(self._failure["error"]) if self._failure else ""

    def _any_hello(self) -> Hello | None:
        return next(iter(self.pool.hellos.values()), None)
