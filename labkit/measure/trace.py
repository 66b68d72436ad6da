"""A run as a trace that Perfetto and chrome://tracing open: one track a rank, a slice a step, its collectives inside.

The form is that of Chrome's trace events (`ph` X for slices, M for names, b and e for what overlaps); times are
microseconds from the first event on. A collective's slice holds two: the wait for the last rank, and the transfer.
Requests are a process of their own, from the scheduled arrival to the last token. Prefill and decode steps differ in
name and category, so that either can be searched for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.measure.breakdown import phase_of
from labkit.measure.clocks import clock_sentences
from labkit.measure.records import RequestRecord, StepRecord

if TYPE_CHECKING:
    import pandas as pd

RANKS, REQUESTS = 1, 2
"""The trace's processes."""
Event = dict[str, Any]


def chrome_trace(
    steps: Sequence[StepRecord], rows: pd.DataFrame, requests: Sequence[RequestRecord] = (), name: str = "labkit",
    clocks: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """rows: one per collective and rank, as `Run.collectives` has them. JSON-ready.

    clocks: as `labkit.measure.clocks.clocks_of` has them; they are told, in `otherData` and beside their ranks' names.
    """
    events = [*_steps(steps), *_collectives(rows), *_requests(requests)]
    origin_ns = min((event["ts"] for event in events), default=0)
    for event in events:
        event["ts"] = (event["ts"] - origin_ns) / 1e3
        if "dur" in event:
            event["dur"] = event["dur"] / 1e3
    ranks = sorted({event["tid"] for event in events if event["pid"] == RANKS})
    return {
        "traceEvents": [*_names(ranks, bool(requests), clocks or ()), *sorted(events, key=_order)],
        "displayTimeUnit": "ms",
        "otherData": {"run": name, "origin_ns": origin_ns}
        | ({} if clocks is None else {"clocks": list(clocks), "clock": " ".join(clock_sentences(clocks))}),
    }


def _order(event: Event) -> tuple[float, float]:
    """By time, and what encloses others before them."""
    return event["ts"], -event.get("dur", 0.0)


def _names(ranks: Iterable[int], has_requests: bool, clocks: Sequence[Mapping[str, Any]]) -> Iterator[Event]:
    yield _named("process_name", RANKS, 0, "ranks")
    elsewhere = {rank: clock for clock in clocks for rank in clock["ranks"]}
    for rank in ranks:
        yield _named("thread_name", RANKS, rank, f"rank {rank}{_beside(elsewhere.get(rank))}")
        yield {"ph": "M", "name": "thread_sort_index", "pid": RANKS, "tid": rank, "args": {"sort_index": rank}}
    if has_requests:
        yield _named("process_name", REQUESTS, 0, "requests")


def _beside(clock: Mapping[str, Any] | None) -> str:
    if clock is None:
        return ""
    ns = clock["uncertainty_ns"]
    return f" ({clock['host']}, {'clock not known' if ns is None else f'± {ns / 1e3:.0f} µs'})"


def _named(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(name: str, cat: str, rank: int, start_ns: int, end_ns: int, **args: Any) -> Event:
    return {"ph": "X", "name": name, "cat": cat, "pid": RANKS, "tid": int(rank), "ts": int(start_ns),
            "dur": int(max(0, end_ns - start_ns)), "args": args}  # fmt: skip


def _steps(steps: Sequence[StepRecord]) -> Iterator[Event]:
    for step in steps:
        phase = phase_of(step)
        told = {"step": step.step_id, "layout": step.layout, "replica": step.replica,
                "prefill_tokens": step.prefill_tokens, "decodes": step.num_decode_seqs}  # fmt: skip
        for at, rank in enumerate(step.ranks):
            sums = {name: getattr(step, f"{name}_ns")[at] / 1e3 for name in ("compute", "wait", "transfer")}
            yield _slice(phase, f"step,{phase}", rank, step.rank_start_ns[at], step.rank_end_ns[at],
                         **told, **{f"{name}_us": value for name, value in sums.items()})  # fmt: skip


def _collectives(rows: pd.DataFrame) -> Iterator[Event]:
    for row in rows.itertuples(index=False):
        begin, end, met = int(row.enter_ns), int(row.exit_ns), int(row.enter_ns + row.wait_ns)
        where = {"axis": row.axis, "phase": row.phase, "layer": int(row.layer), "bytes": int(row.bytes),
                 "step": int(row.step_id)}  # fmt: skip
        yield _slice(f"{row.op} ({row.axis})", f"collective,{row.axis}", row.rank, begin, end, **where)
        if row.wait_ns:
            yield _slice("wait", "wait", row.rank, begin, min(met, end))
        if row.transfer_ns:
            yield _slice("transfer", "transfer", row.rank, min(met, end), end)


def _requests(requests: Sequence[RequestRecord]) -> Iterator[Event]:
    for request in requests:
        end_ns = request.last_ns or request.end_ns
        if not end_ns:
            continue
        same = {"cat": "request", "id": request.request_id, "pid": REQUESTS, "tid": 0}
        spans = [("request", request.scheduled_ns, end_ns)]
        if request.first_ns:
            spans.append(("until the first token", request.scheduled_ns, request.first_ns))
        for name, begin, end in spans:
            told = {"prompt_tokens": request.prompt_tokens, "tokens": request.n, "status": request.status}
            yield {**same, "ph": "b", "name": name, "ts": begin, "args": told}
            yield {**same, "ph": "e", "name": name, "ts": end, "args": {}}
