"""What the page Layouts draws: one frame, complete in itself, of plain numbers and short strings.

The browser keeps no state about the lab, so any frame may be dropped and the newest is always enough. Units are in
the names; None means "not measured (yet)", and is drawn as such, never as zero.
"""

from __future__ import annotations

from typing import Any

import msgspec

from labkit.measure.records import MemoryRecord
from labkit.show.frame_axes import Crossing, Experts, Gantt, Handoff, Kv, PoolInfo
from labkit.show.frame_run import Beside, Run, Steady, Why

LINKS = ("absent", "connecting", "connected", "lost")
"""How the kernel stands with the lab server."""
ROLES = ("watching", "queued", "switching", "running", "stopping")
"""What this visitor is doing with the ranks."""
TTFT_PARTS = ("lateness", "network", "queue", "compute", "wait", "transfer", "handoff", "delivery", "unaccounted")


class PoolChoice(msgspec.Struct):
    """A deployment of several pools that the server offers; single layouts come once, as the widget's `choices`."""

    layout: str
    name: str
    legal: bool
    num_ranks: int
    reason: str = ""
    """Why not, as a sentence; empty when legal."""


class Failure(msgspec.Struct):
    rank: int
    error: str
    kind: str = ""
    traceback: str = ""


class Holder(msgspec.Struct):
    """Who has the ranks, or waits for them."""

    client: str
    purpose: str = ""
    since_s: float = 0.0
    expected_s: float = 0.0
    is_you: bool = False


class Replica(msgspec.Struct):
    waiting: int
    running: int
    kv_used_blocks: int
    kv_total_blocks: int
    ranks: list[int]
    pool: int = 0
    """Index in the lab's `pools`."""
    role: str = "any"


class Part(msgspec.Struct):
    """A rank's share of one part of the model or of the KV cache: `index` of `of` equal pieces."""

    part: str
    kind: str
    """partitioned: nobody else in the replica has this piece; replicated: somebody does."""
    index: int
    of: int
    bytes: int


class RankParts(msgspec.Struct):
    rank: int
    replica: int
    parts: list[Part]


class Machine(msgspec.Struct):
    """Where the figures come from; the provenance badge spells it out."""

    host: str = ""
    model: str = ""
    backend: str = ""
    device: str = ""
    fabric: str = ""
    dtype: str = ""
    num_cores: int = 0
    num_ranks: int = 0
    threads_per_rank: int = 0


class Lab(msgspec.Struct):
    """The lab server's state, for whoever watches."""

    state: str
    layout: str
    layout_name: str
    machine: Machine
    message: str = ""
    restarts_left: int = 0
    failure: Failure | None = None
    holder: Holder | None = None
    queue: list[Holder] = []
    pool_choices: list[PoolChoice] = []
    pools: list[PoolInfo] = []
    replicas: list[Replica] = []
    memory: list[MemoryRecord] = []
    ownership: list[RankParts] = []


class Shares(msgspec.Struct):
    """A rank's time (None: all ranks together), as fractions that add up to 1; within steps, idle is what is left."""

    rank: int | None
    compute: float
    wait: float
    transfer: float
    idle: float = 0.0


class StepShares(msgspec.Struct):
    all: list[Shares] = []
    prefill: list[Shares] = []
    decode: list[Shares] = []
    mixed: list[Shares] = []
    """Steps that carry chunks of prompts and decodes together."""


class Mark(msgspec.Struct):
    age_s: float
    label: str


class Series(msgspec.Struct):
    """The last minute, oldest first; `age_s` counts back from now. None: nothing was measured in that bin."""

    age_s: list[float] = []
    requests_per_s: list[float | None] = []
    goodput_per_s: list[float | None] = []
    input_tokens_per_s: list[float | None] = []
    output_tokens_per_s: list[float | None] = []
    running: list[float | None] = []
    waiting: list[float | None] = []
    marks: list[Mark] = []
    """When the layout changed, and to which."""


class Switch(msgspec.Struct):
    layout: str
    name: str
    ready_s: float
    first_token_s: float | None = None


class Verdict(msgspec.Struct):
    """A remark on the figures' quality: `severity` is note, warning or error."""

    code: str
    severity: str
    sentence: str


class Objective(msgspec.Struct):
    ttft_ms: float = 400.0
    tpot_ms: float = 50.0


class LayoutsFrame(msgspec.Struct):
    link: str = "connecting"
    link_message: str = ""
    role: str = "watching"
    position: int = 0
    """Place in the queue, from 1; 0: not queued."""
    objective: Objective = msgspec.field(default_factory=Objective)
    workloads: list[str] = []
    lab: Lab | None = None
    run: Run | None = None
    beside: Beside | None = None
    why: Why | None = None
    steady: Steady | None = None
    steps: StepShares = msgspec.field(default_factory=StepShares)
    series: Series = msgspec.field(default_factory=Series)
    gantt: Gantt | None = None
    experts: Experts | None = None
    kv: list[Kv] = []
    handoff: Handoff | None = None
    crossings: list[Crossing] = []
    switch: Switch | None = None
    quality: list[Verdict] = []
    notice: str = ""
    """What became of the last command, when it was refused; a sentence."""


def to_message(frame: msgspec.Struct | dict[str, Any]) -> dict[str, Any]:
    """The frame as JSON-ready builtins, floats cut to what a screen can show (a third of the bytes)."""
    return _short(msgspec.to_builtins(frame))


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value]
    return value
