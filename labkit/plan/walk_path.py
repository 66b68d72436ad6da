"""What the walk is told of, and what it answers: a question with its answer and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit.layout import Layout
from labkit.plan.candidates import Candidate
from labkit.plan.case import Case
from labkit.plan.limits import Limit
from labkit.plan.remedies import Remedy

YES, NO, NOT_ASKED = "yes", "no", "not asked"
WALKED = ("tp", "pp", "dp", "pcp", "dcp", "ep")


@dataclass(frozen=True)
class Question:
    code: str
    question: str
    answer: str
    """yes, no, or not asked (every wish was met before it)."""
    sentence: str
    figures: dict[str, Any] = field(default_factory=dict)
    layout: str = ""
    """Where the walk stands after it."""

    def to_dict(self) -> dict[str, Any]:
        return {"code": self.code, "question": self.question, "answer": self.answer, "sentence": self.sentence,
                "figures": self.figures, "layout": self.layout}  # fmt: skip


@dataclass(frozen=True)
class Path:
    """What the walk is told of: how the layout was found."""

    case: Case
    candidates: Sequence[Candidate]
    base: Candidate
    """Where it began: what serves now, or the smallest that holds the model."""
    limit: Limit
    """Of the base: what is addressed."""
    chosen: Candidate | None
    engine: tuple[Remedy, ...] = ()
    others: tuple[Remedy, ...] = ()
    pools: tuple[Candidate, ...] = ()
    measured: bool = False
    """The limit is of a run."""
    given: bool = False
    """The base is what serves now."""
    correction: str = ""
    """How a measurement that contradicts the prediction was taken into account."""

    def of(self, layout: Layout) -> Candidate | None:
        return next((one for one in self.candidates if one.layout == layout), None)

    @property
    def axes(self) -> tuple[str, ...]:
        """Of the chosen layout, those in use."""
        grid = self.chosen.layout if self.chosen else None
        if not isinstance(grid, Layout):
            return ()
        return tuple(axis for axis in WALKED if getattr(grid, axis) > 1)

    def takes(self, candidate: Candidate | None) -> bool:
        """Whether that is the chosen one, simulated since or not."""
        one = self.chosen
        return candidate is not None and one is not None and (one.layout, one.settings) == (
            candidate.layout, candidate.settings)  # fmt: skip

    @property
    def stands(self) -> str:
        """The layout that the walk has come to."""
        return self.chosen.layout.slug if self.chosen else self.base.layout.slug
