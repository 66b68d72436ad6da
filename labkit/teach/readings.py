"""What several lessons read off a run."""

from __future__ import annotations

from labkit.lab import Run


def completed_per_s(run: Run) -> float:
    """Requests over the time from the first arrival to the last token."""
    done = [record for record in run.records if record.status == "completed"]
    span_ns = max(r.last_ns for r in done) - min(r.scheduled_ns for r in done)
    return len(done) / (span_ns / 1e9)
