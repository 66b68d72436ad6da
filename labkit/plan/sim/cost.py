"""What a step of the simulator costs, and a run of steps that differ by a token for each request only.

A cost model is asked for each step with chunks of prompts in it. Steps of decodes alone come by the million: for one
number of decodes the cost is read off a table of knots, an octave of context in sixteen parts, with a straight line
between two of them. A cost that is affine in its context is exact in that, and in the sum over a run of such steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from labkit.plan.sim.plan import SimPlan
from labkit.plan.work import StepWork


def work_of(plan: SimPlan, window: int = 0, shared_rows: float = 0.0) -> StepWork:
    """A planned step as sums. window: what layers with a sliding window look at; 0: there are none. shared_rows: as in
    `StepWork`.

    Of decodes only the sum of their contexts is known; the part inside the window is taken as if all were alike.
    """
    chunks, ends, context = plan.chunks, plan.ends, plan.decode_context
    num_logits = len(plan.sampled) + (0 if plan.decodes else plan.num_decodes)
    if len(chunks) == 1 and not window:
        (tokens,), (end,) = chunks, ends
        pairs = tokens * end - tokens * (tokens - 1) // 2
        return StepWork(tokens, 1, pairs, pairs, end - tokens, plan.num_decodes, context, context, num_logits,
                        shared_rows)  # fmt: skip
    pairs = inside = 0
    for chunk, end in zip(chunks, ends, strict=True):
        pairs += chunk * end - chunk * (chunk - 1) // 2
        if window:
            inside += _window_pairs(end, window) - _window_pairs(end - chunk, window)
    tokens = sum(chunks)
    return StepWork(
        tokens, len(chunks), pairs, inside if window else pairs, sum(ends) - tokens,
        plan.num_decodes, context, min(context, plan.num_decodes * window) if window else context, num_logits,
        shared_rows,
    )  # fmt: skip


def _window_pairs(num_tokens: int, window: int) -> int:
    """Pairs of a causal prompt of so many tokens, each looking back at `window` at most (itself counted)."""
    inside = min(num_tokens, window)
    return inside * (inside + 1) // 2 + (num_tokens - inside) * window


class DecodeTable:
    """Seconds of a step of `num` decodes with `context` KV tokens, all new ones counted."""

    def __init__(self, measure: Callable[[StepWork], float], window: int = 0) -> None:
        self._measure, self._window = measure, window
        self._pieces: dict[tuple[int, int, float], tuple[float, float]] = {}
        """By number, first knot and mean: seconds there, and how they grow by a token up to the next."""

    def of(self, num: int, context: int, shared_rows: float = 0.0) -> float:
        shift = context.bit_length() - 5
        low = context >> shift << shift if shift > 0 else context
        piece = self._pieces.get((num, low, shared_rows))
        if piece is None:
            piece = self._pieces[num, low, shared_rows] = self._piece(num, low, 1 << max(0, shift), shared_rows)
        return piece[0] + piece[1] * (context - low)

    def _piece(self, num: int, low: int, width: int, shared_rows: float) -> tuple[float, float]:
        at_low = self._at(num, low, shared_rows)
        return at_low, (self._at(num, low + width, shared_rows) - at_low) / width

    def _at(self, num: int, context: int, shared_rows: float) -> float:
        inside = min(context, num * self._window) if self._window else context
        work = StepWork(
            decodes=num, decode_context=context, decode_window_context=inside, logits=num, shared_rows=shared_rows
        )
        return self._measure(work)


@dataclass(slots=True)
class Pace:
    """`num` steps, the first of `first` seconds, each `slope` longer than the one before."""

    num: int
    first: float
    slope: float = 0.0

    def after(self, num_steps: int) -> float:
        """Seconds until so many of them are over."""
        return num_steps * self.first + self.slope * (num_steps * (num_steps - 1) / 2)

    def begun(self, seconds: float) -> int:
        """How many have begun strictly before `seconds`, at least 1: the first begins at 0."""
        if seconds <= self.first or self.num == 1:
            return 1
        half = self.first - self.slope / 2
        root = 2 * seconds / (half + math.sqrt(max(0.0, half * half + 2 * self.slope * seconds)))
        num = math.ceil(root)
        if num > self.num:
            num = self.num
        if num <= 1:
            return 1
        before = num - 1
        return before if before * self.first + self.slope * (before * (before - 1) / 2) >= seconds else num
