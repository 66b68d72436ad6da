"""Where each request's time went on the server, summed step by step on the path to the token that was sampled.

A step's figures come after its tokens, so an account stays open until every step that carried its request
has been merged; then its `request` event is due. Before the first token the gaps between a request's steps
are queue; after it, decode queue: queue + compute + wait + transfer is exactly the time from receipt to the
first token's end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from labkit.engine.handoff import Handoff
from labkit.engine.replica import Flight
from labkit.engine.request import Request
from labkit.measure.path import Path, path_of
from labkit.measure.recorder import MergedStep
from labkit.measure.records import ServerTimes


class Account:
    __slots__ = ("request", "times", "latest_ns", "resumed_ns", "num_unmerged", "is_closed")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.times = ServerTimes(
            request_id=request.id,
            run_id=request.run_id,
            layout="",
            replica=-1,
            routed_because="",
            received_ns=request.received_ns,
            first_start_ns=0,
            first_end_ns=0,
            last_end_ns=0,
            finished_ns=0,
            prompt_tokens=len(request.prompt),
            cached_tokens=0,
            output_tokens=0,
            finish_reason="",
            num_preemptions=0,
            requeued=False,
        )
        self.latest_ns = request.received_ns
        """Everything up to this instant is accounted for."""
        self.resumed_ns = 0
        """It was handed over until then: no part of a decode's queue."""
        self.num_unmerged = 0
        self.is_closed = False

    def handed_over(self, handoff: Handoff, end_ns: int) -> None:
        times = self.times
        times.handoff_queue_ns += handoff.start_ns - handoff.left_ns
        times.handoff_ns += end_ns - handoff.start_ns
        times.handoff_bytes += handoff.sent_bytes
        times.released_ns = times.released_ns or (end_ns if handoff.withheld else 0)
        self.resumed_ns = end_ns

    def carried(self, span: Span, sampled: bool) -> None:
        """One step of this request is over."""
        times = self.times
        since_ns = max(self.latest_ns, self.resumed_ns) if times.first_end_ns else self.latest_ns
        queue_ns = max(0, span.start_ns - since_ns) + span.queue_ns
        self.latest_ns = span.end_ns
        self.num_unmerged -= 1
        if times.first_end_ns:
            times.decode_queue_ns += queue_ns
            times.decode_compute_ns += span.compute_ns
            times.decode_wait_ns += span.wait_ns
            times.decode_transfer_ns += span.transfer_ns
        else:
            times.first_start_ns = times.first_start_ns or span.start_ns
            times.queue_ns += queue_ns
            times.compute_ns += span.compute_ns
            times.wait_ns += span.wait_ns
            times.transfer_ns += span.transfer_ns
        if sampled:
            times.first_end_ns = times.first_end_ns or span.end_ns
            times.last_end_ns = span.end_ns

    def close(self, layout: str, now_ns: int, error: str) -> None:
        request, times = self.request, self.times
        times.layout, times.finished_ns, times.error = layout, now_ns, error
        times.replica, times.routed_because = request.replica, request.routed_because
        times.cached_tokens, times.output_tokens = request.num_cached, len(request.output)
        times.finish_reason = str(request.finish_reason or "")
        times.num_preemptions, times.requeued = request.num_preemptions, request.requeued
        self.is_closed = True


@dataclass(frozen=True, slots=True)
class Span:
    """A merged step as a request lives it; its four sums fill the time from start to end."""

    start_ns: int
    end_ns: int
    compute_ns: int
    wait_ns: int
    transfer_ns: int
    queue_ns: int

    @classmethod
    def of_rank(cls, step: MergedStep, rank: int) -> Span:
        """On the rank that sampled; what it waited for the stage before cannot be told further."""
        at = step.ranks.index(rank)
        sums = step.compute_ns[at], step.wait_ns[at], step.transfer_ns[at], step.idle_ns[at]
        return cls(step.start_ns[at], step.end_ns[at], *sums)

    @classmethod
    def along(cls, path: Path, since_ns: int) -> Span:
        """Through the stages, from `since_ns` on: a chunk follows the one before it while that is under way."""
        return cls(max(path.start_ns, since_ns), path.end_ns, *path.since(since_ns))


class Accounts:
    """All open accounts. `emit` gets each ServerTimes once, when nothing can be added to it any more."""

    def __init__(self, emit: Callable[[ServerTimes], None]) -> None:
        self._emit = emit
        self._open: dict[str, Account] = {}

    def open(self, request: Request) -> None:
        self._open[request.id] = Account(request)

    def sent(self, flight: Flight) -> None:
        for request in flight.requests:
            self._open[request.id].num_unmerged += 1

    def merged(self, flight: Flight, step: MergedStep) -> None:
        chain = flight.replica.chain
        path = path_of(step, chain) if len(chain) > 1 else None
        whole = Span.of_rank(step, chain[-1])
        sampled = set(flight.plan.sampled)
        for request in flight.requests:
            account = self._open.get(request.id)
            if account is not None and account.request is request:
                span = whole if path is None else Span.along(path, account.latest_ns)
                account.carried(span, request in sampled)
                self._settle(account)

    def handed_over(self, handoff: Handoff, end_ns: int) -> None:
        """Its KV has landed in another pool."""
        account = self._open.get(handoff.request.id)
        if account is not None and account.request is handoff.request:
            account.handed_over(handoff, end_ns)

    def close(self, request: Request, layout: str, now_ns: int, error: str = "") -> None:
        """The request has ended (with `error`, in the middle: no more figures will come)."""
        account = self._open.get(request.id)
        if account is None:
            return
        account.close(layout, now_ns, error)
        if error:
            account.num_unmerged = 0
        self._settle(account)

    def _settle(self, account: Account) -> None:
        if account.is_closed and not account.num_unmerged:
            del self._open[account.request.id]
            self._emit(account.times)
