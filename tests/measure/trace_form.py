"""The documented form of Chrome's trace events, checked event by event: a trace that breaks it is drawn wrongly."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from labkit.measure.trace import RANKS

METADATA = ("process_name", "process_labels", "process_sort_index", "thread_name", "thread_sort_index")
_SLACK_US = 2e-3
"""Instants are nanoseconds, written in microseconds as floats."""


def validate(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a trace that survives JSON. AssertionError with the event that breaks the form.

    Complete events (X) of one track nest; durations come as matched pairs (B, E); async ones (b, n, e) are matched by
    category and id; a flow's end (f) has a start (s) of its id before it; metadata (M) is of the known kinds.
    """
    told = json.loads(json.dumps(trace, allow_nan=False))
    assert isinstance(told["traceEvents"], list) and told.get("displayTimeUnit", "ms") in ("ms", "ns")
    events = told["traceEvents"]
    for event in events:
        _check_one(event)
    timed = [event for event in events if event["ph"] != "M"]
    _check_nesting([event for event in timed if event["ph"] == "X"])
    _check_pairs([event for event in timed if event["ph"] in "BE"])
    _check_async([event for event in timed if event["ph"] in "ben"])
    _check_flows([event for event in timed if event["ph"] in "stf"], timed)
    return events


def _check_one(event: dict[str, Any]) -> None:
    assert event["ph"] in "XBEbensftiMC", event
    assert isinstance(event["name"], str) and event["name"], event
    assert type(event["pid"]) is int and type(event["tid"]) is int, event
    if event["ph"] == "M":
        assert event["name"] in METADATA and event["args"], event
        key = "sort_index" if event["name"].endswith("sort_index") else event["name"].split("_")[1].rstrip("s") + "s"
        assert ("name" if event["name"].endswith("_name") else key) in event["args"], event
        return
    assert isinstance(event["ts"], int | float) and event["ts"] >= 0 and event["cat"], event
    if event["ph"] == "X":
        assert isinstance(event["dur"], int | float) and event["dur"] >= 0, event
    if event["ph"] in "benstf":
        assert event["id"] not in ("", None), event


def _check_nesting(slices: list[dict[str, Any]]) -> None:
    open_until: dict[tuple[int, int], list[float]] = {}
    for event in sorted(slices, key=lambda each: (each["ts"], -each["dur"])):
        stack, end = open_until.setdefault((event["pid"], event["tid"]), []), event["ts"] + event["dur"]
        while stack and stack[-1] <= event["ts"] + _SLACK_US:
            stack.pop()
        assert not stack or end <= stack[-1] + _SLACK_US, f"slices must nest: {event}"
        stack.append(end)


def _check_pairs(events: list[dict[str, Any]]) -> None:
    opened: dict[tuple[int, int], list[str]] = {}
    for event in sorted(events, key=lambda each: each["ts"]):
        stack = opened.setdefault((event["pid"], event["tid"]), [])
        if event["ph"] == "B":
            stack.append(event["name"])
        else:
            assert stack and stack.pop() == event["name"], f"an end without its beginning: {event}"
    assert not any(opened.values()), f"never ended: {opened}"


def _check_async(events: list[dict[str, Any]]) -> None:
    balance: Counter[tuple[Any, ...]] = Counter()
    for event in sorted(events, key=lambda each: (each["ts"], each["ph"] == "e")):
        key = (event["cat"], event["id"], event["pid"], event["name"])
        balance[key] += {"b": 1, "n": 0, "e": -1}[event["ph"]]
        assert balance[key] >= 0, f"an end without its beginning: {event}"
    assert not +balance, f"never ended: {+balance}"


def _check_flows(flows: list[dict[str, Any]], timed: list[dict[str, Any]]) -> None:
    """Each arrow has two ends, and each end lies on a track that has slices."""
    tracks = {(event["pid"], event["tid"]) for event in timed if event["ph"] in "XB"}
    starts = {(event["cat"], event["id"]): event["ts"] for event in flows if event["ph"] == "s"}
    assert len(starts) == sum(event["ph"] == "s" for event in flows), "an arrow begins once"
    for event in flows:
        assert (event["pid"], event["tid"]) in tracks, f"an arrow from or to nowhere: {event}"
        if event["ph"] != "s":
            begun = starts.get((event["cat"], event["id"]))
            assert begun is not None and begun <= event["ts"] + _SLACK_US, f"an arrow without its beginning: {event}"


def assert_on_one_clock(events: list[dict[str, Any]], ranks: tuple[int, ...], operator: str) -> None:
    """What the profiler saw of a rank lies in the steps that we saw of it."""
    named = [event for event in events if event["ph"] == "M" and event["name"] == "process_name"]
    slices = [event for event in events if event["ph"] == "X"]
    for rank in ranks:
        pids = {event["pid"] for event in named if event["args"]["name"].startswith(f"rank {rank} profiler")}
        steps = [event for event in slices if (event["pid"], event["tid"]) == (RANKS, rank) and "step," in event["cat"]]
        seen = [event for event in slices if event["pid"] in pids and event["name"] == operator]
        assert seen, f"rank {rank} has no {operator}"
        for event in seen:
            middle = event["ts"] + event["dur"] / 2
            assert any(step["ts"] <= middle <= step["ts"] + step["dur"] for step in steps), event
