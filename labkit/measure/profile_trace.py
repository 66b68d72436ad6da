"""A profiled run as one trace: our timeline (steps, collectives, requests) and below it each profiled rank's operators
and kernels, on one clock.

The profiler's processes get numbers of their own, so that two ranks' threads and streams never mix; its flows from
launch to kernel stay.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from typing import Any

from labkit.measure.kernels import TAGS_PID

_FIRST_PID, _PIDS_OF_RANK = 1000, 100
Event = dict[str, Any]


def merge(ours: Mapping[str, Any], profiles: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """ours: of `labkit.measure.trace.chrome_trace`; profiles: by rank, as `labkit.engine.profiling` leaves them.

    Raises ValueError for a profile that does not say how its clock stands to ours.
    """
    other = dict(ours.get("otherData") or {})
    events = [dict(event) for event in ours["traceEvents"]]
    for rank, trace in profiles.items():
        base_ns = (trace.get("labkit") or {}).get("base_monotonic_ns")
        if base_ns is None:
            raise ValueError(f"The profile of rank {rank} has no clock of ours in it: profile with `labkit profile`.")
        shift_us = (int(base_ns) - int(other.get("origin_ns", 0))) / 1e3
        events += _moved(trace, rank, shift_us)
    first = min((event["ts"] for event in events if event["ph"] != "M"), default=0.0)
    if first < 0:  # a profile may begin before the first step that was recorded
        for event in events:
            if event["ph"] != "M":
                event["ts"] -= first
        other["origin_ns"] = int(other.get("origin_ns", 0) + first * 1e3)
    names = [event for event in events if event["ph"] == "M"]
    timed = sorted((e for e in events if e["ph"] != "M"), key=lambda e: (e["ts"], -e.get("dur", 0.0)))
    return {"traceEvents": names + timed, "displayTimeUnit": "ms", "otherData": other}


def on_our_clock(trace: bytes, offset_ns: int) -> bytes:
    """A rank's gzipped trace, told how its host's clock stands to the engine's. Unpacks it: not on an event loop."""
    if not offset_ns:
        return trace
    told = json.loads(gzip.decompress(trace))
    told["labkit"]["base_monotonic_ns"] += offset_ns
    return gzip.compress(json.dumps(told).encode(), 3)


def _moved(trace: Mapping[str, Any], rank: int, shift_us: float) -> Iterator[Event]:
    """The profiler's events on our clock; our own tags in it are left out: our timeline has them already."""
    pids: dict[Any, int] = {}
    threads: dict[tuple[Any, Any], int] = {}
    for given in trace["traceEvents"]:
        if given.get("pid") == TAGS_PID or given.get("ph") not in ("X", "M", "s", "f", "i"):
            continue
        event = dict(given)
        whose = given.get("pid", 0)
        if whose not in pids:
            pids[whose] = _FIRST_PID + rank * _PIDS_OF_RANK + len(pids)
        event["pid"] = pids[whose]
        event["tid"] = _thread(given.get("tid", 0), pids[whose], threads)
        if event["ph"] == "M":
            event.pop("ts", None)
            if event["name"] == "process_name":
                label = (event.get("args") or {}).get("name", "")
                event["args"] = {"name": f"rank {rank} profiler: {label}"}
        else:
            event["ts"] = float(event["ts"]) + shift_us
            event.setdefault("cat", "profiler")
        if "id" in event:
            event["id"] = f"rank{rank}-{event['id']}"
        yield event


def _thread(given: Any, pid: int, threads: dict[tuple[Any, Any], int]) -> int:
    """Threads that the profiler names by words ("Spans") become numbers, since the form asks for them."""
    if isinstance(given, int):
        return given
    return threads.setdefault((pid, given), 2**31 - 1 - len(threads))
