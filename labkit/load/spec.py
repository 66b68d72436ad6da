"""A run of load as one value that can be handed to another process: whom to ask, what, how fast, for how
long.

`schedule_of` turns it into the schedule; everything that can be wrong with it is said there, before anything
is sent.
"""

from __future__ import annotations

import msgspec

from labkit.load.schedule import Schedule, make_schedule
from labkit.load.target import Target
from labkit.load.trace import trace_schedule
from labkit.load.workload import Workload, load_workload


class TraceWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of a trace, and how fast (see trace.trace_schedule)."""

    path: str
    start_s: float = 0.0
    seconds: float | None = None
    time_scale: float = 1.0


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One run of load. Without `seconds`, `num_requests` and `trace` it goes on until it is stopped."""

    target: Target
    run_id: str
    workload: str | Workload = "chat"
    """A shipped workload's name, the path of a TOML file, or the workload itself."""
    trace: TraceWindow | None = None
    """Instead of a workload."""
    rate: float | None = None
    seconds: float | None = None
    num_requests: int | None = None
    concurrency: int = 0
    seed: int | None = None
    vocab_size: int = 8192
    max_context: int | None = None
    length_scale: float = 1.0
    warmup_s: float = 0.0
    num_warmup: int = 0
    drain_s: float | None = None

    @property
    def endless(self) -> bool:
        """It has a rate and no end."""
        return self.seconds is None and self.num_requests is None and self.trace is None and not self.concurrency


def schedule_of(spec: RunSpec) -> Schedule:
    """Raises ValueError or FileNotFoundError with a sentence when the spec makes no sense."""
    if spec.trace is not None:
        return trace_schedule(
            spec.trace.path,
            start_s=spec.trace.start_s,
            seconds=spec.trace.seconds,
            num_requests=spec.num_requests,
            time_scale=spec.trace.time_scale,
            rate=spec.rate,
            length_scale=spec.length_scale,
            max_context=spec.max_context,
            seed=spec.seed or 0,
            vocab_size=spec.vocab_size,
            run_id=spec.run_id,
        )
    workload = spec.workload if isinstance(spec.workload, Workload) else load_workload(spec.workload)
    return make_schedule(
        workload,
        rate=spec.rate,
        seconds=spec.seconds,
        num_requests=spec.num_requests,
        seed=spec.seed,
        vocab_size=spec.vocab_size,
        run_id=spec.run_id,
        concurrency=spec.concurrency,
        length_scale=spec.length_scale,
        max_context=spec.max_context,
    )
