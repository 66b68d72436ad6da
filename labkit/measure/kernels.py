"""What a rank's device did, from a profiler's Chrome trace: kernels by time and class, launches, overlap, gaps.

On CUDA the work is kernels, copies and fills on the device; on a CPU it is operators, each with the time that it spent
itself and not in operators that it called. Communication is what our own tags say (the steps and the door's rows that
`labkit.engine.profiling` puts into the trace) and, on CUDA, the kernels of NCCL. The span of the profiled steps is
shared out without remainder: communication that nothing covers is `exposed`, the covered part `hidden`, work without
communication `compute`, the rest `idle`. Times are milliseconds.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.measure.intervals import Intervals, common, total, union, without
from labkit.measure.kernel_classes import CLASSES, class_of_kernel, class_of_stack, is_nccl, product_work
from labkit.measure.nccl_match import NcclMatch, match_nccl
from labkit.measure.op_stacks import Operator, operators, owners

STEP_CAT, COLLECTIVE_CAT, TAGS_PID = "labkit_step", "labkit_collective", 900_001
_DEVICE_CATS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH_CATS = ("cuda_runtime", "cuda_driver")
Event = Mapping[str, Any]


@dataclass
class Work:
    """All calls of one kernel (or operator). flops, bytes: of matrix products, as their shapes say; else 0."""

    name: str
    kind: str
    num: int = 0
    ms: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0

    def add(self, ms: float, flops: float = 0.0, num_bytes: float = 0.0) -> None:
        self.num, self.ms = self.num + 1, self.ms + ms
        self.flops, self.bytes = self.flops + flops, self.bytes + num_bytes


@dataclass
class RankKernels:
    """One rank's profile. `parts`: {exposed, hidden, compute, idle}, which add up to span_ms."""

    rank: int
    device: str
    """cpu or cuda."""
    num_steps: int
    span_ms: float
    parts: dict[str, float]
    works: list[Work]
    """Longest first."""
    num_launches: int
    launches: dict[str, int]
    nccl_ms: float
    num_nccl: int
    """Kernels of NCCL."""
    num_collectives: int
    """Rows of the door, barriers and the host's halves of transfers included."""
    gaps_ms: list[float] = field(default_factory=list)
    """Stretches inside steps with neither work nor communication, longest first."""
    nccl: NcclMatch | None = None
    """The kernels of NCCL against the door's rows; None without such kernels, or without steps of ours."""
    between_steps_ms: float = 0.0
    """The part of `idle` in which no step was under way: the rank waited for the engine's next plan."""

    @property
    def classes(self) -> dict[str, float]:
        """Milliseconds by class; of concurrent kernels each counts."""
        found = dict.fromkeys(CLASSES, 0.0)
        for work in self.works:
            found[work.kind] += work.ms
        return found

    @property
    def covered(self) -> float | None:
        """Share of communication that computing covers; None without communication."""
        communication = self.parts["hidden"] + self.parts["exposed"]
        return self.parts["hidden"] / communication if communication else None

    @property
    def products(self) -> dict[str, float] | None:
        """Achieved {gflop_s, gb_s} of the matrix products whose shapes the trace tells; None without any."""
        known = [work for work in self.works if work.flops]
        ms = sum(work.ms for work in known)
        if not ms:
            return None
        return {"gflop_s": sum(work.flops for work in known) / ms / 1e6,
                "gb_s": sum(work.bytes for work in known) / ms / 1e6}  # fmt: skip

    def to_dict(self, most: int = 30) -> dict[str, Any]:
        """JSON-ready, with the `most` longest works."""
        return {
            "rank": self.rank, "device": self.device, "num_steps": self.num_steps, "span_ms": self.span_ms,
            "parts_ms": self.parts, "covered": self.covered, "classes_ms": self.classes, "products": self.products,
            "works": [vars(work) for work in self.works[:most]], "num_works": len(self.works),
            "num_launches": self.num_launches, "launches": self.launches, "nccl_ms": self.nccl_ms,
            "num_nccl": self.num_nccl, "num_collectives": self.num_collectives, "num_gaps": len(self.gaps_ms),
            "nccl": vars(self.nccl) if self.nccl else None,
            "longest_gaps_ms": self.gaps_ms[:10], "between_steps_ms": self.between_steps_ms,
        }  # fmt: skip


def read_trace(path: Path) -> dict[str, Any]:
    """A Chrome trace, gzipped or not. Raises ValueError with a sentence when it is none."""
    data = Path(path).read_bytes()
    try:
        trace = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path} is no Chrome trace: {error}. Give the .json or .json.gz of a profiler.") from error
    if isinstance(trace, list):
        trace = {"traceEvents": trace}
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{path} has no traceEvents: give the .json or .json.gz that a profiler exported.")
    return trace


def parse(trace: Mapping[str, Any], rank: int | None = None) -> RankKernels:
    """One rank's trace. Without our steps in it the span is that of everything it holds. Raises ValueError if empty."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    ops = operators(event for event in events if event.get("cat") == "cpu_op")
    device_events = [event for event in events if event.get("cat") in _DEVICE_CATS]
    steps, tags = ([e for e in events if e.get("cat") == cat] for cat in (STEP_CAT, COLLECTIVE_CAT))
    tagged = union(_span(event) for event in tags)
    works = _of_device(device_events, events, ops) if device_events else _of_operators(ops, tagged)
    busy, communication = _occupied(device_events, ops, tagged)
    under_way = union(map(_span, steps)) or union([*busy, *communication])
    if not under_way:
        raise ValueError("The trace holds no kernels, no operators and no steps: nothing ran while it was taken.")
    whole = [(under_way[0][0], under_way[-1][1])]
    parts, idle = _parts(whole, busy, communication)
    inside = common(idle, under_way)
    launches = _launches(events)
    nccl = [event for event in device_events if is_nccl(event["name"])]
    return RankKernels(
        rank=int((trace.get("labkit") or {}).get("rank", 0)) if rank is None else rank,
        device="cuda" if device_events else "cpu",
        num_steps=len(steps),
        span_ms=total(whole) / 1e3,
        parts=parts,
        works=sorted(works, key=lambda work: -work.ms),
        num_launches=sum(launches.values()),
        launches=launches,
        nccl_ms=total(union(map(_span, nccl))) / 1e3,
        num_nccl=len(nccl),
        num_collectives=len(tags),
        nccl=_matched(nccl, tags, steps, events) if nccl and steps else None,
        gaps_ms=sorted(((end - begin) / 1e3 for begin, end in inside), reverse=True),
        between_steps_ms=(total(idle) - total(inside)) / 1e3,
    )


def _matched(
    nccl: Sequence[Event], tags: Sequence[Event], steps: Sequence[Event], events: Sequence[Event]
) -> NcclMatch:
    """In the profiled steps: what runs between them (a handover of KV) has no row."""
    within = _Within(union(map(_span, steps)))
    inside = [event for event in nccl if within.holds(*_span(event))]
    graphs = frozenset(
        (event.get("args") or {}).get("correlation") for event in events
        if event.get("cat") in _LAUNCH_CATS and "GraphLaunch" in event["name"]
    )  # fmt: skip
    return match_nccl(inside, tags, graphs)


def _span(event: Event) -> tuple[float, float]:
    begin = float(event["ts"])
    return begin, begin + float(event.get("dur", 0.0))


def _occupied(
    device_events: Sequence[Event], ops: Sequence[Operator], tagged: Intervals
) -> tuple[Intervals, Intervals]:
    """(work, communication), each as intervals.

    On a CPU an operator inside a collective is the collective's. On CUDA the device's communication is NCCL's kernels;
    the host's view of a collective is of use only where there is no such kernel (a fabric through the host).
    """
    if not device_events:
        roots = union((op.begin, op.end) for op in ops if op.parent is None)
        return without(roots, tagged), tagged
    nccl = union(_span(event) for event in device_events if is_nccl(event["name"]))
    work = union(_span(event) for event in device_events if not is_nccl(event["name"]))
    return work, nccl or tagged


def _parts(whole: Intervals, busy: Intervals, communication: Intervals) -> tuple[dict[str, float], Intervals]:
    busy, communication = common(busy, whole), common(communication, whole)
    idle = without(whole, union([*busy, *communication]))
    hidden = common(communication, busy)
    sums = {"exposed": without(communication, busy), "hidden": hidden, "compute": without(busy, communication),
            "idle": idle}  # fmt: skip
    return {name: total(spans) / 1e3 for name, spans in sums.items()}, idle


def _of_operators(ops: Sequence[Operator], tagged: Intervals) -> list[Work]:
    """By name and class; self time, so that the sum is the time of the threads that ran them."""
    works: dict[tuple[str, str], Work] = {}
    tags = _Within(tagged)
    for op in ops:
        kind = "collective" if tags.holds(op.begin, op.end) else class_of_stack(op.stack)
        work = works.setdefault((op.name, kind), Work(op.name, kind))
        work.add(op.self_us / 1e3, *product_work(op.name, op.args))
    for begin, end in tagged:
        works.setdefault(("collective", "collective"), Work("collective", "collective")).add((end - begin) / 1e3)
    inside = sum(w.ms for w in works.values() if w.kind == "collective" and w.name != "collective")
    if tagged:  # operators inside collectives are told by name: the rest of those intervals is not counted twice
        works["collective", "collective"].ms = max(0.0, works["collective", "collective"].ms - inside)
    return list(works.values())


def _of_device(device_events: Sequence[Event], events: Sequence[Event], ops: Sequence[Operator]) -> list[Work]:
    """By name and class: the operator that launched a kernel knows better than its name what it is for."""
    launched_by = owners([event for event in events if event.get("cat") in _LAUNCH_CATS], ops)
    works: dict[tuple[str, str], Work] = {}
    counted: set[int] = set()
    for event in device_events:
        owner = launched_by.get((event.get("args") or {}).get("correlation"))
        kind = class_of_kernel(event["name"], event["cat"], owner.stack if owner else ())
        work = works.setdefault((event["name"], kind), Work(event["name"], kind))
        product = (0.0, 0.0)
        if owner is not None and kind == "matrix product" and id(owner) not in counted:
            counted.add(id(owner))  # a product in several kernels is one product
            product = product_work(owner.name, owner.args)
        work.add(float(event.get("dur", 0.0)) / 1e3, *product)
    return list(works.values())


def _launches(events: Iterable[Event]) -> dict[str, int]:
    """Calls that put work on the device, by their names."""
    found: dict[str, int] = defaultdict(int)
    for event in events:
        name = event["name"]
        if event.get("cat") in _LAUNCH_CATS and ("Launch" in name or "Memcpy" in name or "Memset" in name):
            found[name] += 1
    return dict(found)


class _Within:
    """Asked in any order, whether a span lies (by its middle) in one of the intervals."""

    def __init__(self, spans: Intervals) -> None:
        self._spans, self._begins = spans, [begin for begin, _ in spans]

    def holds(self, begin: float, end: float) -> bool:
        middle = (begin + end) / 2
        at = bisect_right(self._begins, middle) - 1
        return at >= 0 and middle < self._spans[at][1]
