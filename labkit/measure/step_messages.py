"""Where a model's own messages stand on measured lines: how large each crossing of a step is, how many there are, and
what the line says that they cost.

Bytes are of the whole buffer, as the collectives' rows count them: what an all-gather gives, not one rank's share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from labkit.layout import AnyLayout, Layout, StepShape, pools_of
from labkit.layout.traffic import axis_traffic
from labkit.measure.collectives import BOTH_PLACES, Line
from labkit.model.spec import ModelSpec

AXES = ("tp", "pp", "pcp", "dcp", "ep")
STEPS = {
    "prefill": StepShape(prefill_tokens=512),
    "decode": StepShape(decode_seqs=1, context_tokens=512),
    "decode-8": StepShape(decode_seqs=8, context_tokens=512),
}
"""A prompt of 512 tokens; one sequence, and eight, that decode after so many."""
_BENCHED = {"isend": "sendrecv"}
"""What a step's operation is called in a measurement."""
FindLine = Callable[[str, bool], Line | None]
"""(operation, in place) to its measured line."""


def axis_messages(
    axis: str, layout: Layout, spec: ModelSpec, step: StepShape, dtype_bytes: int, find: FindLine
) -> list[dict[str, Any]]:
    """Of one axis in one step: op, bytes, count, and time_us of one and step_us of all; None without a line."""
    counts: Counter[tuple[str, int]] = Counter()
    degree = len(layout.groups(axis)[0])
    for crossing in axis_traffic(axis, layout, spec, step, dtype_bytes):
        op = _BENCHED.get(crossing.operation, crossing.operation)
        counts[op, crossing.bytes_each * (degree if op == "all_gather" else 1)] += crossing.count
    found = []
    for (op, num_bytes), num in counts.items():
        line = find(op, op in BOTH_PLACES)
        one_us = line.time_us(num_bytes) if line else None
        step_us = one_us * num if one_us is not None else None
        found.append({"op": op, "bytes": num_bytes, "count": num, "time_us": one_us, "step_us": step_us})
    return found


def layout_messages(
    layout: AnyLayout, spec: ModelSpec, dtype_bytes: int, fits: list[Mapping[str, Any]],
    groups: list[Mapping[str, Any]],
) -> list[dict[str, Any]]:  # fmt: skip
    """Of every axis and of each of STEPS, with its phase, its axis and the `fabric` and size of the group that it
    crosses.

    groups: the layout's (`GroupFabric` as dicts). A line counts for every group of its size and fabric.
    """
    fabric_of = {(group["axis"], len(group["ranks"])): group["fabric"] for group in reversed(groups)}
    found = []
    for pool in pools_of(layout):
        for axis in AXES:
            size = len(pool.layout.groups(axis)[0])
            fabric = fabric_of.get((axis, size))
            if fabric is None:
                continue
            find = _finder(fits, fabric, size)
            found += [
                {"phase": phase, "axis": axis, "fabric": fabric, "ranks": size, **message}
                for phase, step in STEPS.items()
                for message in axis_messages(axis, pool.layout, spec, step, dtype_bytes, find)
            ]
    return found


def _finder(fits: list[Mapping[str, Any]], fabric: str, size: int) -> FindLine:
    lines = {
        (each["op"], each["in_place"]): Line(each["alpha_us"], each["gb_per_s"], ())
        for each in reversed(fits)
        if each["fabric"] == fabric and len(each["group_ranks"]) == size
    }
    return lambda op, in_place: lines.get((op, in_place))
