"""torch.profiler on this rank, over so many steps, and what it saw as a Chrome trace with our own tags in it.

The profiler knows operators and kernels, not who they worked for. So the steps (cat `labkit_step`) and the rows of the
door (cat `labkit_collective`) are put into the trace as slices of a process of their own; on shared memory a collective
is no operator at all and would look idle without them.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from labkit.engine.messages import Profile, Profiled
from labkit.measure.kernels import COLLECTIVE_CAT, STEP_CAT, TAGS_PID
from labkit.measure.recorder import AXES, OPS, PHASES, RING_DTYPE

Told = tuple[int, int, int, bytes]
"""A step: (id, start_ns, end_ns, its rows of the ring), instants monotonic."""


class StepProfiler:
    """Does nothing until `begin`; then `before` and `after` every step."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._asked: Profile | None = None
        self._left = 0
        self._profile: profile | None = None
        self._steps: list[Told] = []
        self._started_ns = 0

    def begin(self, message: Profile) -> None:
        """The profiler's own start takes up to seconds the first time: that happens here, between two steps."""
        with self._new():
            torch.zeros(1, device=self._device)
        self._asked, self._left, self._steps = message, message.skip_steps, []

    def _new(self) -> profile:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        return profile(activities=activities, record_shapes=True)

    def before(self) -> None:
        if self._asked is None or self._profile is not None:
            return
        if self._left > 0:
            self._left -= 1
            return
        self._profile = self._new()
        self._profile.__enter__()
        self._started_ns = time.monotonic_ns()

    def after(self, step_id: int, start_ns: int, end_ns: int, ring: bytes) -> Profiled | None:
        """What was seen, once the steps that were asked for are over."""
        if self._asked is None or self._profile is None:
            return None
        # the first step had to wait for the profiler: that was no time of its own
        self._steps.append((step_id, max(start_ns, self._started_ns), end_ns, ring))
        return self.end() if len(self._steps) >= self._asked.num_steps else None

    def end(self) -> Profiled | None:
        """What was seen until now; None when nothing was asked for."""
        asked, running, steps = self._asked, self._profile, self._steps
        self._asked, self._profile, self._steps = None, None, []
        if asked is None:
            return None
        if running is None:
            return Profiled(asked.epoch, self._rank, 0, b"")
        running.__exit__(None, None, None)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            running.export_chrome_trace(str(path))
            trace = json.loads(path.read_text())
        tag(trace, steps, self._rank)
        return Profiled(asked.epoch, self._rank, len(steps), gzip.compress(json.dumps(trace).encode(), 3))


def tag(trace: dict[str, Any], steps: list[Told], rank: int) -> None:
    """Add our slices to a profiler's trace, on its clock; it then also says how to lead its clock back to ours."""
    real_minus_monotonic = time.time_ns() - time.monotonic_ns()
    base_ns = int(trace.get("baseTimeNanoseconds", 0)) - real_minus_monotonic
    trace["labkit"] = {"rank": rank, "base_monotonic_ns": base_ns}

    def slice_(name: str, cat: str, start_ns: int, end_ns: int, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "name": name, "cat": cat, "pid": TAGS_PID, "tid": rank, "ts": (start_ns - base_ns) / 1e3,
                "dur": max(0, end_ns - start_ns) / 1e3, "args": args}  # fmt: skip

    events = trace["traceEvents"]
    for step_id, start_ns, end_ns, ring in steps:
        events.append(slice_(f"step {step_id}", STEP_CAT, start_ns, end_ns, step=step_id))
        for row in np.frombuffer(ring, RING_DTYPE):
            op, axis = OPS[row["op"]], AXES[row["axis"]]
            events.append(
                slice_(f"{op} ({axis})", COLLECTIVE_CAT, int(row["enter_ns"]), int(row["exit_ns"]), op=op, axis=axis,
                       layer=int(row["layer"]), bytes=int(row["bytes"]), phase=PHASES[row["phase"]], step=step_id)
            )  # fmt: skip
