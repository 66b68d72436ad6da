"""The designed load of a calibration: which steps a layout is made to run, so that each part of their cost shows.

They are asked for over HTTP like any load, by the same client: what a step costs on a machine whose cores also serve
the answers is what is wanted. Lone prompts of one length give prefills over growing contexts; bursts of requests give
decodes of one batch size, of unequal lengths as traffic has them; a closed loop of unequal ones gives mixed steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.load.lengths import Lengths
from labkit.load.workload import Arrival, Part, Workload

PREFILLS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1280)
"""Lengths of lone prompts; beyond the token budget of a step they come in chunks over a context."""
BURSTS = (((8, 72), (1, 2, 3, 4, 6, 8, 16)), ((100, 500), (2, 5)))
"""(shortest and longest prompt, how many at once)"""
DECODED_TOKENS = 32
MIXED_CONCURRENCY = (3, 6)
_MIXED_REQUESTS = 8


@dataclass(frozen=True)
class Phase:
    """One load: `num_requests` of `workload`, `concurrency` at a time (0: all at once)."""

    name: str
    workload: Workload
    num_requests: int
    concurrency: int = 0
    lone: bool = False
    """Each request has the server to itself."""


def phases(longest: int, num_replicas: int = 1, effort: float = 1.0) -> list[Phase]:
    """The load of one round of one layout. longest: tokens of prompt and answer that the model takes. effort: below 1,
    fewer of the loads.

    With several replicas the lone requests keep all but one idle, and the others ask a batch of each at once.
    """
    fits = [length for length in PREFILLS if length + DECODED_TOKENS <= longest] or [max(1, longest // 2)]
    found = [_prefill(length) for length in fits]
    found += [_burst(1, (8, min(72, longest // 4)))] * (num_replicas > 1)
    for lengths, sizes in BURSTS:
        if lengths[1] + DECODED_TOKENS <= longest:
            found += [_burst(size * num_replicas, lengths) for size in _fewer(sizes, effort)]
    each = _MIXED_REQUESTS * num_replicas
    return found + [_mixed(most * num_replicas, each, longest) for most in _fewer(MIXED_CONCURRENCY, effort)]


def _fewer(sizes: Sequence[int], effort: float) -> Sequence[int]:
    return sizes if effort >= 1 else sizes[:: max(1, round(1 / effort))]


def _workload(name: str, prompt: Lengths, output: Lengths, process: str = "burst") -> Workload:
    return Workload(name=name, title=name, parts=(Part(prompt, output),), arrival=Arrival(process))


def _prefill(length: int) -> Phase:
    """An answer of a few tokens: the prompt's first, and decodes of one."""
    workload = _workload("calibrate-prefill", Lengths("constant", tokens=length), Lengths("constant", tokens=6))
    return Phase(f"a prompt of {length} tokens", workload, 1, concurrency=1, lone=True)


def _burst(size: int, lengths: tuple[int, int]) -> Phase:
    prompts = Lengths("uniform", min_tokens=lengths[0], max_tokens=max(lengths))
    workload = _workload("calibrate-decode", prompts, Lengths("constant", tokens=DECODED_TOKENS))
    return Phase(f"{size} decodes from {lengths[0]} to {lengths[1]} tokens", workload, size)


def _mixed(concurrency: int, num_requests: int, longest: int) -> Phase:
    prompts = Lengths("uniform", min_tokens=8, max_tokens=max(16, min(640, longest // 2)))
    answers = Lengths("uniform", min_tokens=4, max_tokens=max(8, min(40, longest // 4)))
    workload = _workload("calibrate-mixed", prompts, answers)
    return Phase(f"{concurrency} unequal requests at a time", workload, num_requests, concurrency)
