"""What a step costs on a machine where steps were measured: a sum of parts, each with a fitted coefficient.

The parts are physical: a step's fixed cost (weights read once, launches, the engine's turn), rows of the matrices with
a price that falls as there are more of them, pairs that prompts attend to, keys and values that are read, rows of
logits. Where replicas or stages share cores, each part costs more while the others are at work (`company`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from labkit.plan.work import StepWork

KNOTS = (1, 4, 16, 64, 256)
"""Rows of a step at which the price of one more changes: a product of few rows waits for memory, of many for the
cores, and in between each library has steps of its own."""
ROWS = tuple(f"rows_{first}_{last}" for first, last in pairwise(KNOTS)) + (f"rows_{KNOTS[-1]}_up",)
PARTS = ("step", *ROWS, "prompts", "prompt_pairs", "prompt_context", "decodes", "decode_context", "logits")
GROUPS = {
    "overhead": ("step", "prompts", "decodes"),
    "matrices": (*ROWS, "logits"),
    "attention": ("prompt_pairs",),
    "kv": ("prompt_context", "decode_context"),
}
"""How `FittedCost.parts` adds them up. The weights' one read stands in `overhead`: it cannot be told from launches."""


def features(work: StepWork) -> list[float]:
    """How much of each of PARTS a step has."""
    rows = work.prefill_tokens + work.decodes
    return [
        1.0,
        *(float(min(max(rows - first, 0), last - first)) for first, last in pairwise(KNOTS)),
        float(max(rows - KNOTS[-1], 0)),
        float(work.prefill_seqs),
        float(work.prefill_pairs),
        float(work.prefill_context),
        float(work.decodes),
        float(work.decode_context),
        float(work.logits),
    ]


@dataclass(frozen=True)
class StageCost:
    """Seconds for one of each of PARTS on the ranks of a stage: alone, and what others at work add."""

    alone: tuple[float, ...]
    company: tuple[float, ...] = (0.0,) * len(PARTS)

    def mixed(self, share: float) -> StageCost:
        """With others at work for `share` of the time: no further company."""
        return StageCost(tuple(a + share * c for a, c in zip(self.alone, self.company, strict=True)))

    def seconds(self, amounts: Sequence[float]) -> float:
        return sum(price * amount for price, amount in zip(self.alone, amounts, strict=True))


@dataclass(frozen=True)
class ClientCost:
    """What a client sees beside the steps, on the way there and back, in seconds."""

    request_s: float = 0.0
    """Scheduled arrival until the first step may begin: connection, parsing, routing."""
    prompt_token_s: float = 0.0
    """And for each token of the prompt."""
    first_token_s: float = 0.0
    """Sampled until it is at the client."""
    next_token_s: float = 0.0

    def ttft_s(self, engine_s: float, prompt_tokens: int) -> float:
        """engine_s: from the request's arrival at the scheduler to its first token."""
        return self.request_s + self.prompt_token_s * prompt_tokens + engine_s + self.first_token_s

    def tpot_s(self, engine_s: float, output_tokens: int) -> float:
        if output_tokens < 2:
            return engine_s
        return engine_s + (self.next_token_s - self.first_token_s) / (output_tokens - 1)


@dataclass(frozen=True)
class FittedCost:
    """A `labkit.plan.work.StepCost` of one layout. Make one with `labkit.plan.calibration`."""

    layout: str
    stages: tuple[StageCost, ...]
    hops_s: float = 0.0
    """Of a step through several stages: plan, hidden states and ids on the way, beside the stages' own time."""
    turnaround_s: float = 0.0
    """Of a stage between one step and the next that waits for it."""
    collective: tuple[float, float] = (0.0, 0.0)
    """Of a step, inside its stages' time: seconds of crossing between ranks, fixed and for each row."""
    axis: str = "tp"
    """What that crossing belongs to."""
    handoff_token_s: float = 0.0
    client: ClientCost = ClientCost()
    error: float = 0.0
    """Mean absolute relative error over the measured steps."""

    @property
    def has_company(self) -> bool:
        """Whether steps cost more while other replicas or stages are at work."""
        return any(any(stage.company) for stage in self.stages)

    def with_company(self, share: float) -> FittedCost:
        """As it is while the others work for `share` (0 to 1) of the time that a step of this one takes."""
        if not 0 <= share <= 1:
            raise ValueError(f"The share of time in which others work is {share:g}: it lies between 0 and 1.")
        return replace(self, stages=tuple(stage.mixed(share) for stage in self.stages))

    def seconds(self, work: StepWork) -> float:
        """From the plan to the ids, and the engine's turn until the next plan."""
        amounts = features(work)
        return self.hops_s + sum(stage.seconds(amounts) for stage in self.stages)

    def interval(self, work: StepWork) -> float:
        if len(self.stages) == 1:
            return self.seconds(work)
        amounts = features(work)
        return self.turnaround_s + max(stage.seconds(amounts) for stage in self.stages)

    def parts(self, work: StepWork) -> dict[str, float]:
        amounts = dict(zip(PARTS, features(work), strict=True))
        prices = [sum(column) for column in zip(*(stage.alone for stage in self.stages), strict=True)]
        each = {name: price * amounts[name] for name, price in zip(PARTS, prices, strict=True)}
        found = {group: sum(each[name] for name in names) for group, names in GROUPS.items()}
        return self._crossing(work, found)

    def _crossing(self, work: StepWork, found: dict[str, float]) -> dict[str, float]:
        """What crosses was measured inside the stages' time: it is taken out of where it was fitted into."""
        fixed, per_row = self.collective
        rows = per_row * (work.prefill_tokens + work.decodes)
        fixed, rows = min(fixed, found["overhead"]), min(rows, found["matrices"])
        found["overhead"] += self.hops_s - fixed
        found["matrices"] -= rows
        if fixed + rows:
            found[self.axis] = fixed + rows
        return found

    def shared_rows(self, rows: Sequence[float]) -> float:
        return sum(rows) / len(rows)

    def handoff_seconds(self, num_tokens: int) -> float:
        return self.handoff_token_s * num_tokens


def stage_cost(alone: Mapping[str, float], company: Mapping[str, float] | None = None) -> StageCost:
    """From coefficients by name; a part that is not named costs nothing. Raises ValueError for an unknown one."""
    for name in {*alone, *(company or {})} - set(PARTS):
        raise ValueError(f"{name!r} is no part of a step's cost; there are {', '.join(PARTS)}.")
    return StageCost(*(tuple(float(each.get(name, 0.0)) for name in PARTS) for each in (alone, company or {})))
