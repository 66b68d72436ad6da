"""Between streams and schedulers: a request finds its replica, a step's tokens find their streams.

The order within a turn is the point: token ids in, the scheduler takes them, the next plan goes to every
rank of the replica, and only then, while the ranks compute, are tokens handed out and earlier steps'
figures merged. It knows ranks only as numbers to send to, and lives on while layouts come and go.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

from labkit.engine.accounts import Accounts
from labkit.engine.flights import Flights
from labkit.engine.handoff import Handoff, Handoffs
from labkit.engine.lockstep import next_round
from labkit.engine.messages import Moved, MoveKV, Sampled, Step
from labkit.engine.plan import StepPlan
from labkit.engine.pools import Pools
from labkit.engine.replica import Flight, Replica
from labkit.engine.reporter import Reporter
from labkit.engine.request import FinishReason, Phase, Request, RequestRefused
from labkit.engine.stream import EngineDown, RequestStream, TokenLogprobs
from labkit.engine.watchdog import STEP_TIMEOUT_S, Watchdog

Send = Callable[[Sequence[int], Step | MoveKV], None]


class Dispatcher:
    """flights: where steps go once they are sent. check: walk the pools after every step (tests).

    on_hung(ranks, what): these have not answered a step, or a handoff, for `step_timeout_s`.
    """

    def __init__(
        self,
        send: Send,
        reporter: Reporter,
        accounts: Accounts,
        flights: Flights,
        on_hung: Callable[[Sequence[int], str], None],
        *,
        step_timeout_s: float = STEP_TIMEOUT_S,
        check: bool = False,
    ) -> None:
        self._send, self._reporter, self._accounts, self._flights = send, reporter, accounts, flights
        self._check = check
        self._streams: dict[str, RequestStream] = {}
        self._backlog: dict[str, Request] = {}
        """Requests that wait for a layout to stand."""
        self._handoffs = Handoffs(send)
        self._watchdog = Watchdog(flights.by_step, step_timeout_s, lambda ranks: on_hung(ranks, "a step"))
        self._move_watchdog = Watchdog(
            self._handoffs.moving, step_timeout_s, lambda ranks: on_hung(ranks, "a handoff of KV")
        )
        self._quiet: asyncio.Future[None] | None = None
        self.last_step_id = 0
        self.is_open = False
        self._pools = Pools()
        self._epoch, self._layout = 0, ""
        self._withholds = True

    @property
    def num_requests(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    @property
    def replicas(self) -> Sequence[Replica]:
        return self._pools.replicas

    def _is_busy(self) -> bool:
        return bool(self._handoffs.moving) or any(replica.num_in_flight for replica in self.replicas)

    def describe(self) -> list[dict[str, Any]]:
        return [replica.describe() for replica in self.replicas]

    def describe_pools(self) -> list[dict[str, Any]]:
        return [pool.describe() for pool in self._pools.pools]

    # ---- layouts come and go

    def open(self, pools: Pools, epoch: int, layout: str, withholds: bool = True) -> None:
        """A layout stands: whoever waited is routed, in order of arrival.

        withholds: a first token reaches the user only when its KV has reached the pool that decodes.
        """
        self._pools, self._epoch, self._layout, self._withholds = pools, epoch, layout, withholds
        self.resume(f"After the switch to {layout}: ", requeued=True)

    def resume(self, why: str = "", requeued: bool = False) -> None:
        """Whoever waited is routed, in order of arrival; what cannot be served any more is told, after `why`."""
        self.is_open = True
        backlog, self._backlog = self._backlog, {}
        for request in sorted(backlog.values(), key=lambda request: request.received_ns):
            request.requeued |= requeued
            try:
                self._route(request)
            except RequestRefused as refusal:
                self._fail(request, EngineDown(f"{why}{refusal}"))

    async def close(self) -> None:
        """Plan no more steps and wait for those on their way; everybody then waits for the next layout.

        Raises EngineDown when the ranks end meanwhile.
        """
        await self.hold()
        for handoff in self._handoffs.end_all():
            self._release(handoff)
        for replica in self.replicas:
            self._backlog.update((request.id, request) for request in replica.scheduler.drain())
        self._pools = Pools()

    async def hold(self) -> None:
        """Plan no more steps and wait for those on their way; the layout stands, and requests wait for `resume`."""
        self.is_open = False
        if self._is_busy():
            self._quiet = asyncio.get_running_loop().create_future()
            await self._quiet

    def fail(self, error: EngineDown) -> None:
        """The ranks are gone: every request ends with the sentence."""
        self.is_open = False
        self._pools = Pools()
        self._flights.by_step.clear()
        self._handoffs.clear()
        self._backlog.clear()
        for stream in list(self._streams.values()):
            self._fail(stream.request, error)
        if self._quiet is not None:
            self._quiet.set_exception(error)
            self._quiet = None

    def _fail(self, request: Request, error: EngineDown) -> None:
        request.phase, request.finish_reason = Phase.FINISHED, FinishReason.ERROR
        self._streams.pop(request.id).fail(error)
        self._accounts.close(request, self._layout, time.monotonic_ns(), str(error))

    # ---- requests come and go

    def submit(self, request: Request) -> RequestStream:
        """Raises RequestRefused when the layout that stands can never serve it."""
        if self.is_open:
            self._route(request)
        else:
            self._backlog[request.id] = request
        stream = self._streams[request.id] = RequestStream(request)
        self._accounts.open(request)
        return stream

    def _route(self, request: Request) -> None:
        replica, reason = self._pools.begin(request)
        replica.scheduler.add(request)
        request.replica, request.routed_because = replica.index, reason
        self._wake(replica)
        self._reporter.start_pulse()

    def end(self, request_id: str, reason: FinishReason) -> None:
        """End a request from outside; nothing happens when it has ended."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        request = stream.request
        if self._backlog.pop(request_id, None) is not None:
            request.phase, request.finish_reason = Phase.FINISHED, reason
        else:
            replica = self.replicas[request.replica]
            replica.scheduler.abort(request_id, reason)
            if (source := self._handoffs.withdraw(request_id)) is not None:
                self._wake(source)
            self._wake(replica)
        stream.end(reason)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        del self._streams[request.id]
        self._accounts.close(request, self._layout, time.monotonic_ns())

    # ---- a replica's turn

    def _wake(self, replica: Replica) -> None:
        """Look for a step once the requests that arrive together are all there."""
        if not replica.is_woken:
            replica.is_woken = True
            asyncio.get_running_loop().call_soon(self._woken, replica)

    def _woken(self, replica: Replica) -> None:
        replica.is_woken = False
        self._send_steps(replica)

    def sampled(self, message: Sampled) -> None:
        flight = self._flights.find(message)
        if flight is None:
            return
        flight.end_ns = time.monotonic_ns()
        replica = flight.replica
        replica.num_in_flight -= 1
        finished = replica.scheduler.complete(flight.plan, message.token_ids) if flight.plan else []
        self._hand_over(replica, flight.end_ns)
        self._send_steps(replica)
        self._hand_out(flight, message, finished)
        replica.note_pace(flight)
        self._flights.merge_if_whole(flight)
        if self._check:
            replica.scheduler.check_integrity()
        self._note_quiet()

    def _note_quiet(self) -> None:
        if self._quiet is not None and not self._is_busy():
            self._quiet.set_result(None)
            self._quiet = None

    def _send_steps(self, replica: Replica) -> None:
        companions = self._pools.companions(replica)
        if companions:
            self._send_rounds(companions)
        else:
            while self.is_open and (plan := replica.scheduler.schedule()) is not None:
                self._send_step(replica, plan)
        for each in companions or (replica,):
            if self._handoffs.start(each, self._epoch):
                self._move_watchdog.watch()

    def _send_rounds(self, replicas: Sequence[Replica]) -> None:
        while self.is_open and (plans := next_round(replicas)):
            flights = [self._send_step(*each) for each in zip(replicas, plans, strict=True)]
            for flight in flights:
                flight.companions = flights

    def _send_step(self, replica: Replica, plan: StepPlan) -> Flight:
        self.last_step_id += 1
        message = plan.to_message(self._epoch, self.last_step_id)
        start_ns = time.monotonic_ns()
        self._send(replica.ranks, message)
        return self._note_sent(replica, plan, start_ns)

    def _note_sent(self, replica: Replica, plan: StepPlan, start_ns: int) -> Flight:
        context_tokens = sum(plan.context_lens)
        flight = Flight(
            self.last_step_id, plan, plan.requests, context_tokens, replica, self._epoch, start_ns
        )
        replica.num_in_flight += 1
        self._flights.add(flight)
        self._watchdog.watch()
        if self._check:
            replica.scheduler.check_integrity()
        return flight

    def _hand_out(self, flight: Flight, message: Sampled, finished: list[Request]) -> None:
        logprobs: Sequence[TokenLogprobs] | repeat[None] = message.logprobs or repeat(None)
        for request, token_id, logprob in zip(flight.plan.sampled, message.token_ids, logprobs, strict=False):
            stream = self._streams.get(request.id)
            if stream is not None and stream.request is request:
                if self._withholds and (handoff := self._handoffs.waiting.get(request.id)) is not None:
                    handoff.withheld = (token_id, logprob)
                    continue
                stream.push(token_id, logprob, request.finish_reason)
        for request in finished:
            self._forget(request)

    # ---- from the pool that prefills to the pool that decodes

    def _hand_over(self, source: Replica, now_ns: int) -> None:
        """Queue what has just been prefilled where it will be decoded."""
        handed, source.scheduler.handed = source.scheduler.handed, []
        for request in handed:
            target, reason = self._pools.take_over(request)
            self._handoffs.open(request, source, target, now_ns)
            request.replica = target.index
            request.routed_because += f"; decode: {reason}"
            target.scheduler.adopt(request)
            self._wake(target)

    def moved(self, message: Moved) -> None:
        """A rank has given or taken its part of a request's KV."""
        handoff = self._handoffs.moved(message) if message.epoch == self._epoch else None
        if handoff is None:
            return
        end_ns = time.monotonic_ns()
        handoff.source.scheduler.let_go(handoff.request.id)
        handoff.target.scheduler.landed(handoff.request)
        self._accounts.handed_over(handoff, end_ns)
        self._reporter.handoff(handoff, end_ns)
        for replica in (handoff.target, handoff.source):
            self._send_steps(replica)
        self._release(handoff)
        if self._check:
            handoff.source.scheduler.check_integrity()
            handoff.target.scheduler.check_integrity()
        self._note_quiet()

    def _release(self, handoff: Handoff) -> None:
        """Give the user the token that waited for its KV."""
        stream = self._streams.get(handoff.request.id)
        if handoff.withheld is not None and stream is not None and stream.request is handoff.request:
            stream.push(*handoff.withheld, None)
