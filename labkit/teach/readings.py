"""What several lessons read off a run."""

from __future__ import annotations

from labkit.lab import Run
from labkit.layout import Layout
from labkit.measure.crossings import Crossings, crossings


def completed_per_s(run: Run) -> float:
    """Requests over the time from the first arrival to the last token."""
    done = [record for record in run.records if record.status == "completed"]
    span_ns = max(r.last_ns for r in done) - min(r.scheduled_ns for r in done)
    return len(done) / (span_ns / 1e9)


def messages(run: Run, phase: str, axis: str = "") -> list[Crossings]:
    """What steps of that phase sent between ranks, by axis and kind of operation, the logits' gather left out."""
    found = crossings(run.collectives, run.step_records, by_op=True)
    return [each for each in found if each.phase == phase and each.op != "gather" and axis in ("", each.axis)]


def message_us(run: Run, phase: str = "decode") -> float:
    """Median µs of the transfer of a sum or of a message between stages: what is left when all have arrived."""
    rows = run.collectives
    mine = rows[(rows["phase"] == phase) & rows["op"].isin(["all_reduce", "recv"]) & (rows["bytes"] > 0)]
    return float(mine["transfer_ns"].median() / 1000)


def at_once(layout: Layout, axis: str, op: str = "") -> int:
    """How many operations of an axis a step has beside each other, for each that a card counts.

    One a group of the replica that works at the same time; those of other stages come after it. In a ring each rank
    of the group sends.
    """
    groups = sum(group[0] in layout.replica_ranks(0) for group in layout.groups(axis))
    if axis == "pp":
        return groups
    return max(1, groups // layout.pp) * (getattr(layout, axis) if op in ("send", "isend") else 1)
