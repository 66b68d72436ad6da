"""The schedule is made whole before the first send: who asks what, when. The same seed gives the same
schedule.

Three generators, spawned from one seed, draw arrivals, kinds and lengths, and token ids; so a rate stretches
time and changes nothing else, and a run id changes the ids and nothing else. A schedule without an end (the
live page) is the same stream read as it is needed; a closed loop is the same requests without times.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from labkit.load.arrivals import unit_gaps
from labkit.load.prompts import SMALL_ENGINES_IDS, PromptMaker, small_engines_set
from labkit.load.workload import Part, Sharing, Workload


class PlannedRequest(msgspec.Struct, frozen=True, eq=False):
    """One request of a schedule. `prompt_ids`: int32 [prompt tokens]."""

    index: int
    gap: float
    """Time since the one before, in mean gaps."""
    prompt_ids: np.ndarray
    max_tokens: int
    at_s: float = 0.0
    """Arrival after the run's start; 0 in a closed loop and in a schedule without an end."""
    part: str = ""
    prefix_id: int = -1
    """Which shared prefix it begins with; -1: none."""
    block_ids: tuple[int, ...] = ()
    """A trace's own ids of its prefix blocks."""
    cut: bool = False
    """Shortened to fit the model's context."""


@dataclass(frozen=True)
class Schedule:
    """What a run sends. Exactly one of `requests` (made whole) and `endless` (read as needed) is filled."""

    workload: str
    requests: tuple[PlannedRequest, ...] = ()
    endless: Iterator[PlannedRequest] | None = None
    rate: float = 0.0
    """Requests per second asked for; 0 when there is none (closed loop, burst)."""
    concurrency: int = 0
    """Above 0: closed loop with this many requests in flight."""
    seconds: float | None = None
    seed: int = 0
    temperature: float = 0.0
    ignore_eos: bool = True

    @property
    def num_cut(self) -> int:
        """Requests that were shortened to fit the model's context."""
        return sum(request.cut for request in self.requests)

    def share(self, worker: int, num_workers: int) -> tuple[PlannedRequest, ...]:
        """Every num_workers-th request from `worker` on: together the shares are the schedule, once each."""
        if not 0 <= worker < num_workers:
            raise ValueError(f"worker must be in 0..{num_workers - 1}; got {worker}.")
        return self.requests[worker::num_workers]


def make_schedule(
    workload: Workload,
    rate: float | None = None,
    seconds: float | None = None,
    num_requests: int | None = None,
    seed: int | None = None,
    vocab_size: int = 8192,
    run_id: str = "",
    concurrency: int = 0,
    length_scale: float = 1.0,
    max_context: int | None = None,
) -> Schedule:
    """The schedule of one run; without `seconds` and `num_requests` it has no end.

    rate: requests per second (the workload's own by default). concurrency: above 0 for a closed loop, which
    has no rate. max_context: prompt + answer of every request is cut to this many tokens. Raises ValueError
    on what makes no sense.
    """
    rate = workload.arrival.rate if rate is None else rate
    _check(rate, seconds, num_requests, concurrency, max_context)
    seed = workload.seed if seed is None else seed
    num_requests = num_requests or workload.num_requests or None
    stream = request_stream(workload.scaled(length_scale), seed, vocab_size, run_id, max_context)
    timeless = bool(concurrency) or workload.arrival.process == "burst"
    common = Schedule(
        workload=workload.name,
        rate=0.0 if timeless else rate,
        concurrency=concurrency,
        seconds=seconds,
        seed=seed,
        temperature=workload.temperature,
        ignore_eos=workload.ignore_eos,
    )
    return _filled(common, stream, None if timeless else rate, num_requests)


def _check(
    rate: float, seconds: float | None, num_requests: int | None, concurrency: int, max_context: int | None
) -> None:
    for name, value in (("rate", rate), ("seconds", seconds), ("num_requests", num_requests)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be above 0; got {value}.")
    if concurrency < 0:
        raise ValueError(f"concurrency must be 0 (open loop) or the number in flight; got {concurrency}.")
    if max_context is not None and max_context < 2:
        raise ValueError(f"a context of {max_context} tokens has no room for a prompt and an answer; give 2 or more.")


def _filled(
    common: Schedule, stream: Iterator[PlannedRequest], rate: float | None, num_requests: int | None
) -> Schedule:
    if rate is not None and common.seconds is not None:
        num_timed = max(1, round(rate * common.seconds))
        num_requests = min(num_timed, num_requests or num_timed)
    if num_requests is None:
        if rate is None and not common.concurrency:
            raise ValueError(f"workload {common.workload!r} sends all at once: say num_requests.")
        return replace(common, endless=stream)
    requests = tuple(itertools.islice(stream, num_requests))
    return replace(common, requests=requests if rate is None else _timed(requests, rate))


def _timed(requests: tuple[PlannedRequest, ...], rate: float) -> tuple[PlannedRequest, ...]:
    """Puts arrivals at the running sum of gaps, stretched so that the last of N comes at N / rate.

    So the rate that is offered is the rate that was asked for, not a draw around it; a Poisson process whose
    Nth arrival is known is still one before it.
    """
    units = np.cumsum([request.gap for request in requests])
    at_s = units * (len(requests) / rate / units[-1])
    return tuple(msgspec.structs.replace(request, at_s=float(at)) for request, at in zip(requests, at_s, strict=True))


def request_stream(
    workload: Workload, seed: int, vocab_size: int, run_id: str = "", max_context: int | None = None
) -> Iterator[PlannedRequest]:
    """The workload's requests, without end unless it is a fixed set; `at_s` is not set."""
    arrivals, kinds = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(2))
    maker = PromptMaker(vocab_size, seed, run_id)
    bodies = (
        _published(workload, seed, maker) if workload.generator == "small-engines" else _drawn(workload, kinds, maker)
    )
    for index, (gap, (part, prefix_id, ids, output)) in enumerate(
        zip(unit_gaps(workload.arrival, arrivals), bodies, strict=False)
    ):
        kept, num_output = fit(ids, output, max_context)
        yield PlannedRequest(
            index=index,
            gap=gap,
            prompt_ids=kept,
            max_tokens=num_output,
            part=part,
            prefix_id=prefix_id,
            cut=len(kept) + num_output < len(ids) + output,
        )


class Outline(msgspec.Struct, frozen=True):
    """A request without its words: what a simulator needs of it."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    """What its prompt begins with, one id for each `block_tokens`: equal ids are equal tokens."""
    block_tokens: int = 0


def outline(
    workload: Workload, num_requests: int, rate: float | None = None, seed: int | None = None,
    length_scale: float = 1.0, max_context: int | None = None,
) -> list[Outline]:  # fmt: skip
    """The requests of `make_schedule` with the same seed, at the same instants, and none of the token ids made."""
    rate = workload.arrival.rate if rate is None else rate
    _check(rate, None, num_requests, 0, max_context)
    scaled = workload.scaled(length_scale)
    seed = workload.seed if seed is None else seed
    arrivals, kinds = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(2))
    lengths = list(itertools.islice(_lengths(scaled, seed, kinds), num_requests))
    units = np.cumsum(list(itertools.islice(unit_gaps(workload.arrival, arrivals), len(lengths))))
    at_s = units * (len(units) / rate / units[-1]) if units[-1] else units
    return [_outlined(at, drawn, max_context) for at, drawn in zip(at_s.tolist(), lengths, strict=True)]


def _outlined(at_s: float, drawn: _Lengths, max_context: int | None) -> Outline:
    prefix_id, prefix_tokens, num_prompt, num_output = drawn
    num_prompt, num_output = fit_lengths(prefix_tokens + num_prompt, num_output, max_context)
    ids = () if prefix_id < 0 else (prefix_id,)
    return Outline(at_s, num_prompt, num_output, ids, prefix_tokens)


def _lengths(workload: Workload, seed: int, rng: np.random.Generator) -> Iterator[_Lengths]:
    if workload.generator == "small-engines":
        for ids, output in small_engines_set(workload.num_requests, seed):
            yield -1, 0, len(ids), output
        return
    for part, drawn in _drawn_lengths(workload, rng):
        yield drawn[0], part.sharing.prefix_tokens if part.sharing else 0, drawn[1], drawn[2]


_Lengths = tuple[int, int, int, int]
"""Shared prefix (−1: none), its tokens, other prompt tokens, output tokens."""
_Body = tuple[str, int, np.ndarray, int]


def _published(workload: Workload, seed: int, maker: PromptMaker) -> Iterator[_Body]:
    for ids, output in small_engines_set(workload.num_requests, seed):
        yield workload.parts[0].name, -1, maker.moved(ids, SMALL_ENGINES_IDS), output


def _drawn_lengths(workload: Workload, rng: np.random.Generator) -> Iterator[tuple[Part, tuple[int, int, int]]]:
    """For each request its part, and (prefix, prompt tokens of its own, output tokens)."""
    weights = np.array([part.weight for part in workload.parts])
    cumulative = np.cumsum(weights / weights.sum())
    popularity = {part.name: _zipf(part.sharing) for part in workload.parts if part.sharing}
    while True:
        which = min(int(np.searchsorted(cumulative, rng.random(), side="right")), len(weights) - 1)
        part = workload.parts[which]
        num_prompt, num_output, prefix_id = part.prompt_tokens.draw(rng), part.output_tokens.draw(rng), -1
        if part.sharing is not None:
            chosen = int(np.searchsorted(popularity[part.name], rng.random(), side="right"))
            prefix_id = which * 100_000 + min(chosen, part.sharing.num_prefixes - 1)
        yield part, (prefix_id, num_prompt, num_output)


def _drawn(workload: Workload, rng: np.random.Generator, maker: PromptMaker) -> Iterator[_Body]:
    for part, (prefix_id, num_prompt, num_output) in _drawn_lengths(workload, rng):
        ids = maker.among(part.token_ids, num_prompt) if part.token_ids else maker.unique(num_prompt)
        if part.sharing is not None:
            ids = np.concatenate([maker.block(prefix_id, part.sharing.prefix_tokens), ids])
        yield part.name, prefix_id, ids, num_output


def _zipf(sharing: Sharing) -> np.ndarray:
    """Cumulative popularity of the prefixes, float [num_prefixes]."""
    weights = np.arange(1, sharing.num_prefixes + 1, dtype=float) ** -sharing.zipf
    return np.cumsum(weights / weights.sum())


def fit(ids: np.ndarray, output: int, max_context: int | None) -> tuple[np.ndarray, int]:
    """Cuts a request to a context: the answer keeps at most half of it, the prompt takes what is left."""
    num_prompt, output = fit_lengths(len(ids), output, max_context)
    return ids[:num_prompt], output


def fit_lengths(num_prompt: int, output: int, max_context: int | None) -> tuple[int, int]:
    """(prompt tokens, output tokens) that `fit` leaves."""
    if max_context is None or num_prompt + output <= max_context:
        return num_prompt, output
    output = min(output, max(1, max_context // 2))
    return min(num_prompt, max_context - output), output
