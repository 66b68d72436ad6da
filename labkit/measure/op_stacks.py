"""Operators of a profiler's trace as calls within calls: who called whom, and the time that each spent itself."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]


@dataclass(eq=False)
class Operator:
    """One call. Times in microseconds on the trace's clock."""

    name: str
    begin: float
    end: float
    thread: tuple[Any, Any]
    parent: Operator | None
    args: Mapping[str, Any]
    self_us: float

    @property
    def stack(self) -> tuple[str, ...]:
        """Names, outermost first."""
        names = [self.name]
        above = self.parent
        while above is not None:
            names.append(above.name)
            above = above.parent
        return tuple(reversed(names))


def operators(events: Iterable[Event]) -> list[Operator]:
    """In order of their beginning, thread by thread; calls on one thread nest."""
    by_thread: dict[tuple[Any, Any], list[Event]] = defaultdict(list)
    for event in events:
        by_thread[event.get("pid"), event.get("tid")].append(event)
    found: list[Operator] = []
    for thread, mine in by_thread.items():
        open_: list[Operator] = []
        for event in sorted(mine, key=lambda e: (float(e["ts"]), -float(e.get("dur", 0.0)))):
            begin, took = float(event["ts"]), float(event.get("dur", 0.0))
            while open_ and open_[-1].end <= begin:
                open_.pop()
            parent = open_[-1] if open_ else None
            if parent is not None:
                parent.self_us = max(0.0, parent.self_us - took)
            open_.append(Operator(event["name"], begin, begin + took, thread, parent, event.get("args") or {}, took))
            found.append(open_[-1])
    return found


def owners(launches: Sequence[Event], ops: Sequence[Operator]) -> dict[Any, Operator]:
    """By correlation, the innermost operator that was under way on the launching thread."""
    by_thread: dict[tuple[Any, Any], list[Operator]] = defaultdict(list)
    for each in ops:
        by_thread[each.thread].append(each)
    begins = {thread: [op.begin for op in mine] for thread, mine in by_thread.items()}
    found: dict[Any, Operator] = {}
    for event in launches:
        thread = event.get("pid"), event.get("tid")
        at = bisect_right(begins.get(thread, []), float(event["ts"])) - 1
        op: Operator | None = by_thread[thread][at] if at >= 0 else None
        while op is not None and op.end < float(event["ts"]):
            op = op.parent
        correlation = (event.get("args") or {}).get("correlation")
        if op is not None and correlation is not None:
            found[correlation] = op
    return found
