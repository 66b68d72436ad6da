"""A load and what it measured, what explains it, and what it is held against; all as plain figures, for the page.

`Run` is the same struct for the load that runs now and for a stored run beside it: None is what nobody recorded.
"""

from __future__ import annotations

import msgspec

from labkit.measure.records import MemoryRecord


class Percentiles(msgspec.Struct):
    """Of one latency in ms, over the current layout's requests. `few`: percentiles with under 10 samples beyond."""

    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    mean: float | None = None
    n: int = 0
    few: list[str] = []


class Goodput(msgspec.Struct):
    """Requests that met both objectives. `attainment` is over the scheduled ones, with its 95 % interval."""

    per_s: float | None = None
    attainment: float | None = None
    low: float | None = None
    high: float | None = None


class Run(msgspec.Struct):
    """This visitor's own load and what it measured since the last switch; or a stored run, whole."""

    layout: str
    layout_name: str
    workload: str
    rate: float | None
    router: str
    admission: str
    started_at: str
    num_completed: int = 0
    num_failed: int = 0
    ttft_ms: Percentiles = msgspec.field(default_factory=Percentiles)
    tpot_ms: Percentiles = msgspec.field(default_factory=Percentiles)
    ttft_parts_ms: dict[str, float | None] = {}
    requests_per_s: float | None = None
    input_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    goodput: Goodput = msgspec.field(default_factory=Goodput)


class Waterfall(msgspec.Struct):
    """The parts, in ms, of the requests around percentile `q` of TTFT or TPOT. `few`: too few requests for it."""

    figure: str
    q: int
    parts: dict[str, float]
    total_ms: float
    n: int
    few: bool


class Reason(msgspec.Struct):
    """What holds a figure up: `kind` as `labkit.measure.binding.Verdict` has it, and the figures that say so."""

    figure: str
    q: int
    kind: str
    sentence: str


class Why(msgspec.Struct):
    waterfalls: list[Waterfall] = []
    reasons: list[Reason] = []


class Steady(msgspec.Struct):
    """Since when the load is in a steady state. steady None: too few requests to tell."""

    steady: bool | None
    age_s: float | None
    """How long ago the steady part began."""
    why: str
    sentence: str


class Condition(msgspec.Struct):
    """One circumstance of both sides. `there` is "" where it was not recorded; `same` is None then."""

    name: str
    here: str
    there: str
    same: bool | None


class Difference(msgspec.Struct):
    """Percentile of the current load minus that of what it is held against, in ms, with its 95 % interval."""

    figure: str
    percentile: int
    difference_ms: float | None
    low_ms: float | None
    high_ms: float | None
    then_ms: float | None
    n: int
    n_then: int
    few: bool
    verdict: str
    """less, more, cannot tell, too few."""


class Beside(msgspec.Struct):
    """What the current figures are held against: a stored run, or a layout that was pinned while it ran."""

    run_id: str
    """Empty for a pinned layout: the page itself has its figures."""
    run: Run | None = None
    at: str = ""
    """When it was measured."""
    recorder: str = ""
    """Who is named for what it lacks."""
    memory: list[MemoryRecord] = []
    why: Why | None = None
    missing: list[str] = []
    """parts, memory, steps: what the recorder did not tell."""
    conditions: list[Condition] = []
    differences: list[Difference] = []
    remarks: list[str] = []
    """What the stored run says against itself, and where its definitions differ."""
