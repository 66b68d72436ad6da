"""The load client: sends a schedule to a server and measures each request from the instant it was due.

What is due is sent when it is due, whether or not the server has answered what came before; so a server that
stalls is charged for everyone who would have waited. Request bytes are written and connections opened ahead;
the loop is woken by a timer of nanoseconds; garbage collection stands still. What the client could not do in
time it reports.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from array import array
from collections.abc import Callable

from labkit.load.alarm import Alarm, spin_until
from labkit.load.pacing import ClosedPacer, EndlessPacer, Pacer, check_rate, pacer_for
from labkit.load.quiet import quiet_gc, raise_file_limit, scheduling
from labkit.load.report import LoadReport, judge, lateness_of, rate_of
from labkit.load.schedule import PlannedRequest, Schedule
from labkit.load.target import RequestWriter, Target, WrittenAhead
from labkit.load.trial import find_model, negotiate, reach
from labkit.load.wire import Exchange, Pool
from labkit.measure.records import RequestRecord

LEAD_NS = 50_000_000
"""From the end of the preparations to the start of the schedule."""
_AHEAD_ENDLESS = 128
_SENDS_AT_ONCE = 16
"""After so many sends in a row the loop reads what has arrived."""
_MAX_WARM = 2048


class LoadRun:
    """One run, awaited once by `run`; `set_rate` and `progress` may be called meanwhile, in the loop."""

    def __init__(
        self,
        target: Target,
        schedule: Schedule,
        on_record: Callable[[RequestRecord], None] | None = None,
        run_id: str = "run",
        stop: asyncio.Event | None = None,
        warmup_s: float = 0.0,
        num_warmup: int = 0,
        drain_s: float | None = None,
        keep_records: bool = True,
        on_start: Callable[[int], None] | None = None,
    ) -> None:
        self._target, self._schedule = target, schedule
        self._on_record, self._on_start = on_record, on_start
        self._stop = stop or asyncio.Event()
        self._warmup_ns, self._num_warmup = round(warmup_s * 1e9), num_warmup
        self._drain_s = target.timeout_s if drain_s is None else drain_s
        self._keep = keep_records
        self._records: list[RequestRecord] = []
        self._run_id = run_id
        self._in_flight: dict[int, Exchange] = {}
        self._late_ns, self._sent_ns = array("q"), array("q")
        self._counts = dict.fromkeys(("completed", "failed", "refused", "cancelled", "unsent"), 0)
        self._pool = Pool(target, self._num_spare())
        self._pacer: Pacer = pacer_for(schedule, 0)
        self._last_due_ns = 0
        self._num_estimated = 0
        self._sending = False
        self._idle = asyncio.Event()

    async def run(self) -> LoadReport:
        """Sends everything, waits for the answers, reports. Raises ServerUnusable before the first send."""
        raise_file_limit()
        try:
            await self._prepare()
            with quiet_gc():
                report = await self._send_and_wait()
        finally:
            await self._pool.close()
        return report

    def _num_spare(self) -> int:
        return 0 if self._schedule.concurrency else max(4, round(self._schedule.rate / 8))

    def _num_warm(self) -> int:
        schedule = self._schedule
        if schedule.concurrency:
            return min(schedule.concurrency, _MAX_WARM)
        if not schedule.rate:
            return min(len(schedule.requests), _MAX_WARM)
        wanted = max(8, round(schedule.rate))
        return min(wanted, _MAX_WARM, len(schedule.requests) or wanted)

    async def _prepare(self) -> None:
        """Everything that must not happen while the clock runs."""
        await reach(self._target, self._pool)
        model = await find_model(self._target)
        schedule = self._schedule
        writer = RequestWriter(
            self._target,
            self._run_id,
            model,
            temperature=schedule.temperature,
            ignore_eos=schedule.ignore_eos,
        )
        self._writer = dataclasses.replace(writer, dialect=await negotiate(self._target, self._pool, writer))
        self._written = WrittenAhead(iter(schedule.endless or schedule.requests), self._writer)
        self._written.fill(len(schedule.requests) or _AHEAD_ENDLESS)
        await self._pool.warm(self._num_warm())
        self._pool.num_cold = 0

    async def _send_and_wait(self) -> LoadReport:
        self._start_ns = time.monotonic_ns() + LEAD_NS
        self._pacer = pacer_for(self._schedule, self._start_ns)
        self._sending = True
        self._alarm = Alarm(self._send_due)
        sweep = asyncio.get_running_loop().create_task(self._sweep())
        if self._on_start is not None:
            self._on_start(self._start_ns)
        try:
            self._set_alarm()
            await self._until_idle_or_stopped()
        finally:
            self._sending = False
            sweep.cancel()
            precise = self._alarm.precise
            self._alarm.close()
            self._cancel_rest()
        return self._report(precise)

    async def _until_idle_or_stopped(self) -> None:
        stopped = asyncio.ensure_future(self._stop.wait())
        idle = asyncio.ensure_future(self._idle.wait())
        try:
            await asyncio.wait({stopped, idle}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            idle.cancel()

    # ---- sending

    def _send_due(self) -> None:
        """Sends what is due, a few at a time, and sets the alarm for what is next."""
        for _ in range(_SENDS_AT_ONCE):
            due_ns = self._next_due_ns()
            if due_ns is None or due_ns - time.monotonic_ns() > 200_000:
                break
            spin_until(due_ns)
            self._send_one(self._pacer.pop())
        self._set_alarm()
        asyncio.get_running_loop().call_soon(self._written.fill, _AHEAD_ENDLESS)

    def _next_due_ns(self) -> int | None:
        first = self._written.first() if self._sending else None
        return self._pacer.peek_ns(first.gap) if first is not None else None

    def _set_alarm(self) -> None:
        due_ns = self._next_due_ns()
        if due_ns is not None:
            self._alarm.set(due_ns)
        elif not self._in_flight:
            self._idle.set()

    def _send_one(self, due_ns: int) -> None:
        request, payload = self._written.take()
        record = self._record(request, due_ns)
        exchange = Exchange(payload, record, self._ended)
        self._in_flight[request.index] = exchange
        self._last_due_ns = due_ns
        self._pool.send(exchange)

    def _record(self, request: PlannedRequest, due_ns: int) -> RequestRecord:
        return RequestRecord(
            request_id=self._writer.request_id(request.index),
            index=request.index,
            status="unsent",
            scheduled_ns=due_ns,
            asked_prompt_tokens=len(request.prompt_ids),
            asked_output_tokens=request.max_tokens,
            warmup=request.index < self._num_warmup or due_ns < self._start_ns + self._warmup_ns,
        )

    def set_rate(self, rate: float) -> None:
        """Changes the rate from now on. Raises ValueError when this run has no rate of its own to change."""
        if self._schedule.endless is None or self._schedule.concurrency:
            raise ValueError("only a run without an end has a rate that can change; start it without seconds.")
        check_rate(rate)
        self._schedule = dataclasses.replace(self._schedule, rate=rate)
        self._pool.num_spare = self._num_spare()
        if self._sending and isinstance(self._pacer, EndlessPacer):
            self._pacer.set_rate(rate, time.monotonic_ns())
            self._set_alarm()

    # ---- endings

    def _ended(self, exchange: Exchange) -> None:
        record = exchange.record
        self._in_flight.pop(record.index, None)
        self._num_estimated += exchange.answer.estimated
        if record.sent_ns:
            self._late_ns.append(record.sent_ns - record.scheduled_ns)
            self._sent_ns.append(record.sent_ns)
        self._pacer.ended(record.end_ns, record.status in ("failed", "refused"))
        self._deliver(record)
        if self._sending and (isinstance(self._pacer, ClosedPacer) or not self._in_flight):
            self._set_alarm()

    def _deliver(self, record: RequestRecord) -> None:
        self._counts[record.status] += 1
        if self._keep:
            self._records.append(record)
        if self._on_record is not None:
            self._on_record(record)

    async def _sweep(self) -> None:
        """Ends what takes too long: each request after timeout_s, all of them drain_s after the last send."""
        pause_s = min(1.0, self._target.timeout_s / 4, max(self._drain_s / 4, 0.01))
        while True:
            await asyncio.sleep(pause_s)
            now_ns = time.monotonic_ns()
            limit_ns = round(self._target.timeout_s * 1e9)
            for exchange in list(self._in_flight.values()):
                if now_ns - (exchange.record.sent_ns or exchange.record.scheduled_ns) > limit_ns:
                    self._drop(exchange, "failed", f"no end within {self._target.timeout_s:g} s")
            if self._next_due_ns() is None and now_ns - self._last_due_ns > self._drain_s * 1e9:
                self._stop.set()

    def _drop(self, exchange: Exchange, status: str, error: str) -> None:
        if not exchange.record.sent_ns and status == "cancelled":
            status = "unsent"
        exchange.settle(status, error)
        if exchange.connection is not None and exchange.connection.exchange is exchange:
            exchange.connection.close()

    def _cancel_rest(self) -> None:
        for exchange in list(self._in_flight.values()):
            self._drop(exchange, "cancelled", "the run ended before the answer did")
        for due_ns in self._pacer.remaining_ns():
            self._deliver(self._record(self._written.take()[0], due_ns))

    # ---- reporting

    def progress(self) -> dict[str, int]:
        """Counts so far: in_flight, sent, and one per status."""
        return {
            "in_flight": len(self._in_flight),
            "sent": len(self._sent_ns) + len(self._in_flight),
            **self._counts,
        }

    def _report(self, precise: bool) -> LoadReport:
        self._records.sort(key=lambda record: record.index)
        report = LoadReport(
            run_id=self._run_id,
            workload=self._schedule.workload,
            records=self._records,
            start_ns=self._start_ns,
            end_ns=time.monotonic_ns(),
            window_start_ns=self._window_start_ns(),
            window_end_ns=max(self._last_due_ns, self._start_ns),
            asked_rate=self._schedule.rate,
            offered_rate=rate_of(self._sent_ns, self._start_ns),
            concurrency=self._schedule.concurrency,
            seed=self._schedule.seed,
            num_sent=len(self._sent_ns),
            num_cut=self._schedule.num_cut,
            num_estimated=self._num_estimated,
            num_connections=self._pool.num_opened,
            num_cold=self._pool.num_cold,
            lateness=lateness_of(self._late_ns),
            precise_timer=precise,
            scheduling=scheduling(),
            options=dataclasses.asdict(self._writer.dialect),
        )
        judge(report)
        return report

    def _window_start_ns(self) -> int:
        start_ns = self._start_ns + self._warmup_ns
        counted = [record.scheduled_ns for record in self._records if not record.warmup and record.sent_ns]
        return max(start_ns, min(counted)) if self._num_warmup and counted else start_ns


async def run_load(
    target: Target,
    schedule: Schedule,
    on_record: Callable[[RequestRecord], None] | None = None,
    run_id: str = "run",
    stop: asyncio.Event | None = None,
    warmup_s: float = 0.0,
    num_warmup: int = 0,
    drain_s: float | None = None,
) -> LoadReport:
    """Sends `schedule` to `target`; every request of it ends up in a record, also those that were never sent.

    on_record: called in the loop as each request is settled. stop: when set, nothing more is sent and what is
    under way is cancelled. warmup_s, num_warmup: requests due before, or the first so many, are flagged
    `warmup`. drain_s: how long after the last send answers are waited for (default: the target's timeout).
    """
    return await LoadRun(target, schedule, on_record, run_id, stop, warmup_s, num_warmup, drain_s).run()
