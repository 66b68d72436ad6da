"""The traffic that a plan is made for: how long prompts and answers are, how much of them is shared, how they come.

Read from a workload (a name under data/workloads, a TOML file), from a public trace (its own arrivals), or from two
numbers (`8192/1024`: tokens in, tokens out). Lengths of a workload are drawn with a fixed seed, so that the same words
give the same plan.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from labkit.load.lengths import UNBOUNDED_TOKENS
from labkit.load.trace import TraceRow, read_trace
from labkit.load.workload import Part, Workload, load_workload
from labkit.said import say

NUM_DRAWN = 2000
"""Requests drawn of a workload: their mean is within 2 % of the distribution's where lengths vary by as much as their
mean (1/sqrt(n))."""
MAX_TRACE_ROWS = 20_000
MOST = 10**9
"""Requests a second, or in flight: beyond what anybody serves."""
_TWO_NUMBERS = re.compile(r"(\d{1,12})\s*/\s*(\d{1,12})")
_TRACE_SUFFIXES = (".csv", ".jsonl")


@dataclass(frozen=True)
class Demand:
    """Tokens are means where not said otherwise. Exactly one of `rate` and `concurrency` is set."""

    name: str
    prompt_tokens: int
    output_tokens: int
    long_prompt_tokens: int
    """p95."""
    longest_tokens: int
    """Prompt and answer of the longest request."""
    shared_tokens: int = 0
    """Of a mean prompt, found in a prefix cache that keeps everything."""
    rate: float | None = None
    concurrency: int | None = None
    lengths: tuple[tuple[int, int], ...] = ()
    """(prompt, answer) of the requests drawn, in order; what a simulation is fed."""

    def __post_init__(self) -> None:
        for name, value in (("prompt_tokens", self.prompt_tokens), ("output_tokens", self.output_tokens)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")
        if (self.rate is None) == (self.concurrency is None):
            raise ValueError("Traffic comes at a rate or with a number of requests in flight: give one of the two.")
        if self.rate is not None and not 0 < self.rate <= MOST:
            raise ValueError(f"--rate is {self.rate:g}: requests per second, above 0 and at most {MOST:,}.")
        if self.concurrency is not None and not 1 <= self.concurrency <= MOST:
            raise ValueError(f"--concurrency is {self.concurrency}: requests in flight, from 1 to {MOST:,}.")

    @property
    def tokens_each(self) -> int:
        """What a request holds in KV when it ends."""
        return self.prompt_tokens + self.output_tokens

    @property
    def load(self) -> str:
        if self.rate is not None:
            return say("{rate:g} requests/s", rate=self.rate)
        return say("{n} in flight", n=self.concurrency)

    def with_prompt(self, tokens: int) -> Demand:
        """The same traffic with prompts of another length."""
        factor = tokens / self.prompt_tokens
        return replace(
            self, prompt_tokens=tokens, long_prompt_tokens=max(1, round(self.long_prompt_tokens * factor)),
            shared_tokens=min(self.shared_tokens, tokens),
            lengths=tuple((max(1, round(prompt * factor)), answer) for prompt, answer in self.lengths),
        )  # fmt: skip

    def at_load(self, load: float) -> Demand:
        """Another rate, or another number in flight, whichever this one is given by."""
        if self.rate is not None:
            return replace(self, rate=load)
        return replace(self, concurrency=max(1, round(load)))

    def to_dict(self) -> dict[str, Any]:
        names = ("name", "prompt_tokens", "output_tokens", "long_prompt_tokens", "longest_tokens", "shared_tokens")
        return {name: getattr(self, name) for name in (*names, "rate", "concurrency")}


def read_demand(
    text: str | Workload,
    *,
    rate: float | None = None,
    concurrency: int | None = None,
    length_scale: float = 1.0,
) -> Demand:
    """Raises ValueError or FileNotFoundError with a sentence. Without rate and concurrency: the workload's own rate."""
    if rate is not None and concurrency is not None:
        raise ValueError("Give --rate or --concurrency, not both: an open loop has a rate, a closed one a number.")
    if isinstance(text, str) and (pair := two_numbers(text)):
        return _of_numbers(*pair, rate, concurrency, length_scale)
    if isinstance(text, str) and Path(text).suffix in _TRACE_SUFFIXES:
        return _of_trace(Path(text), rate, concurrency, length_scale)
    workload = load_workload(text) if isinstance(text, str) else text
    return _of_workload(workload.scaled(length_scale), rate, concurrency)


def two_numbers(text: str) -> tuple[int, int] | None:
    """`8192/1024` as (tokens in, tokens out); None for the name of a workload or a file. Raises ValueError for numbers
    of another form."""
    if match := _TWO_NUMBERS.fullmatch(text.strip()):
        return int(match[1]), int(match[2])
    if "/" in text and text.strip()[:1].isdigit() and not Path(text).suffix:
        raise ValueError(f"{text!r} is no pair of lengths: write tokens in and tokens out, such as 8192/1024.")
    return None


def _of_numbers(
    prompt: int, output: int, rate: float | None, concurrency: int | None, length_scale: float = 1.0
) -> Demand:  # fmt: skip
    if min(prompt, output) < 1:
        raise ValueError(f"{prompt}/{output}: tokens in and tokens out, at least 1 each.")
    if rate is None and concurrency is None:
        raise ValueError(f"{prompt}/{output} says lengths and no load: add --rate or --concurrency.")
    name = f"{prompt}/{output}"
    prompt, output = (_scaled(tokens, length_scale) for tokens in (prompt, output))
    return Demand(name, prompt, output, prompt, prompt + output, rate=rate, concurrency=concurrency,
                  lengths=((prompt, output),))  # fmt: skip


def _scaled(tokens: int, length_scale: float) -> int:
    if not 0 < length_scale < math.inf:
        raise ValueError(f"the length scale must be above 0; got {length_scale}.")
    return max(1, round(min(tokens * length_scale, UNBOUNDED_TOKENS)))


def _of_workload(workload: Workload, rate: float | None, concurrency: int | None) -> Demand:
    if workload.generator != "labkit":
        raise ValueError(f"{workload.name} is a fixed set of prompts, sent all at once: plan for one with lengths.")
    rng = np.random.default_rng(0)
    weights = np.array([part.weight for part in workload.parts])
    chosen = rng.choice(len(workload.parts), NUM_DRAWN, p=weights / weights.sum())
    rows = [_drawn(workload.parts[index], rng) for index in chosen]
    shared = [_found(workload.parts[index]) for index in chosen]
    if rate is None and concurrency is None:
        rate = workload.arrival.rate
    return demand_of_rows(workload.name, rows, round(float(np.mean(shared))), rate, concurrency)


def _drawn(part: Part, rng: np.random.Generator) -> tuple[int, int]:
    shared = part.sharing.prefix_tokens if part.sharing else 0
    return part.prompt_tokens.draw(rng) + shared, part.output_tokens.draw(rng)


def _found(part: Part) -> int:
    """A prefix is computed once and found from then on."""
    return part.sharing.prefix_tokens if part.sharing else 0


def _of_trace(path: Path, rate: float | None, concurrency: int | None, length_scale: float) -> Demand:
    found = read_trace(path)[:MAX_TRACE_ROWS]
    rows = [(_scaled(row.prompt_tokens, length_scale), _scaled(row.output_tokens, length_scale)) for row in found]
    span_s = found[-1].at_s - found[0].at_s
    if rate is None and concurrency is None:
        if not span_s:
            raise ValueError(f"{path.name}: all requests come at once, so it has no rate; add --rate or --concurrency.")
        rate = len(found) / span_s
    return demand_of_rows(path.stem, rows, round(_shared_of(found) * length_scale), rate, concurrency)


def _shared_of(rows: Sequence[TraceRow]) -> float:
    """Mean tokens of a prompt whose blocks stood in an earlier one, with a cache that forgets nothing."""
    seen: set[int] = set()
    found = 0.0
    for row in rows:
        known = next((at for at, block in enumerate(row.block_ids) if block not in seen), len(row.block_ids))
        if row.block_ids:
            found += min(row.prompt_tokens - 1, known * row.prompt_tokens / len(row.block_ids))
        seen.update(row.block_ids)
    return found / len(rows)


def demand_of_rows(
    name: str, rows: Sequence[tuple[int, int]], shared: int, rate: float | None, concurrency: int | None
) -> Demand:
    prompts, outputs = (np.array(column) for column in zip(*rows, strict=True))
    return Demand(
        name=name,
        prompt_tokens=max(1, round(float(prompts.mean()))),
        output_tokens=max(1, round(float(outputs.mean()))),
        long_prompt_tokens=round(float(np.percentile(prompts, 95))),
        longest_tokens=int((prompts + outputs).max()),
        shared_tokens=shared,
        rate=rate,
        concurrency=concurrency,
        lengths=tuple((int(prompt), int(output)) for prompt, output in rows),
    )
