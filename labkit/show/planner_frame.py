"""What the page Planner draws beside its plan: how far the planning is, what the machine at hand could run, and a run
of the layout on it. Plain numbers and short strings, complete in itself, as `labkit.show.frame` has it.
"""

from __future__ import annotations

import msgspec

from labkit.show.frame import Lab, Verdict


class Here(msgspec.Struct):
    """What the lab server of this machine can run."""

    model: str
    num_ranks: int
    legal: list[str]
    """Slugs, from the server's own table."""


class TrialRow(msgspec.Struct):
    """A percentile, predicted of this very run and measured in it; None: there is no figure (yet). Milliseconds."""

    metric: str
    name: str
    predicted: float | None
    low: float | None
    """Predicted if every step were faster by what steps are known to."""
    high: float | None
    measured: float | None
    n: int = 0
    limit: float | None = None


class Trial(msgspec.Struct):
    layout: str
    model: str
    workload: str
    rate: float
    role: str
    position: int
    n: int
    """Requests measured."""
    calibrated: bool
    """There is a prediction for this machine."""
    rows: list[TrialRow] = []
    calibrated_at: str = ""
    notes: list[str] = []
    """What the calibration says against itself."""


class PlannerFrame(msgspec.Struct):
    link: str = "offline"
    """As the other pages' link; offline where there is no server, which planning does not need."""
    link_message: str = ""
    role: str = "watching"
    position: int = 0
    lab: Lab | None = None
    provenance: str = "none"
    planning: bool = False
    """All layouts are being looked at."""
    here: Here | None = None
    trial: Trial | None = None
    switch: None = None
    quality: list[Verdict] = []
    notice: str = ""
