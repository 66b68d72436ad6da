"""What the page Fabric draws live: the lab's state, how far a measurement is, telemetry, and the last steps.

What was measured travels apart from the frames, as the widget's `measured`: it is larger, and changes when somebody
measures. Units are in the names; None means "not measured", and is drawn as such, never as zero.
"""

from __future__ import annotations

from typing import Any

import msgspec

from labkit.show.frame import Lab, Verdict


class Progress(msgspec.Struct):
    done: int
    total: int
    what: dict[str, Any] = {}
    """kind pairs (a, b once one is done) or curve (op, fabric, ranks)."""
    is_yours: bool = False


class Device(msgspec.Struct):
    """A GPU, a rank's process, or the host: what it told last, and over the last minute."""

    kind: str
    index: int
    now: dict[str, float]
    series: dict[str, list[float | None]] = {}
    """By the same names, a mean for each bin of the last minute, oldest first; None: no sample in the bin."""
    throttles: list[str] = []


class Telemetry(msgspec.Struct):
    source: str = ""
    """nvml or psutil; empty where nothing is sampled."""
    span_s: float = 60.0
    devices: list[Device] = []


class TimelineStep(msgspec.Struct):
    step_id: int
    replica: int
    start_ms: float
    end_ms: float
    prefill_tokens: int = 0
    decodes: int = 0


class TimelineRank(msgspec.Struct):
    rank: int
    bars: list[list[float]]
    """[start_ms, length_ms, kind] in order; kind: 0 compute, 1 wait, 2 transfer, 3 idle."""
    last: int = 0
    """How many collectives it was the last to enter, of `of` that it shared with others."""
    of: int = 0


class Timeline(msgspec.Struct):
    span_ms: float
    steps: list[TimelineStep]
    ranks: list[TimelineRank]
    one_clock: bool = True
    """False: ranks' rows may be shifted against each other."""


class FabricFrame(msgspec.Struct):
    link: str = "connecting"
    link_message: str = ""
    role: str = "watching"
    lab: Lab | None = None
    nodes: list[dict[str, Any]] = []
    """Each with its host and ranks."""
    groups: list[dict[str, Any]] = []
    """Of the layout: axis, ranks, fabric, spans_nodes."""
    link_between: str = ""
    """Of nodes made on this machine: the rate that their link was given."""
    measured_at: str = ""
    """When what is shown was measured, local time; empty: nothing was."""
    provenance: str = "none"
    """measured (since the lab server started), recorded (before), none."""
    progress: Progress | None = None
    telemetry: Telemetry = msgspec.field(default_factory=Telemetry)
    timeline: Timeline | None = None
    quality: list[Verdict] = []
    switch: None = None
    notice: str = ""
