"""The designed load of a calibration: which steps a layout is made to run, so that each part of their cost shows.

They are asked for over HTTP like any load, by the same client: what a step costs on a machine whose cores also serve
the answers is what is wanted. Prompts of one length, one at a time, give prefills over growing contexts; bursts of
equal requests give decodes of one batch size over growing contexts; a closed loop of unequal ones gives mixed steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.load.lengths import Lengths
from labkit.load.workload import Arrival, Part, Workload

PREFILLS = (24, 48, 96, 160, 256, 384, 512, 800, 1400)
"""Prompt lengths of lone prefills; beyond the token budget of a step they come in chunks over a context."""
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)
CONTEXTS = (32, 480)
"""Prompt lengths of the decoding bursts."""
DECODED_TOKENS = 20
MIXED_CONCURRENCY = (2, 4, 8)


@dataclass(frozen=True)
class Phase:
    """One load: `num_requests` of `workload`, `concurrency` at a time (0: all at once)."""

    name: str
    workload: Workload
    num_requests: int
    concurrency: int = 0


def phases(longest: int, num_replicas: int = 1, effort: float = 1.0) -> list[Phase]:
    """The load of one layout. longest: tokens of prompt and answer that the model takes. effort: multiplies how often.

    With several replicas every batch is asked of each of them: alone, and (a burst of twice as many) all at once.
    """
    fits = [length for length in PREFILLS if length + DECODED_TOKENS <= longest] or [max(1, longest // 2)]
    contexts = [length for length in CONTEXTS if length + 2 * DECODED_TOKENS <= longest] or [max(1, longest // 4)]
    found = [_prefills(fits, max(1, round(3 * effort)))]
    sizes = BATCHES if effort >= 1 else BATCHES[:: max(1, round(1 / effort))]
    for context in contexts:
        found += [_decodes(size, context) for size in _sizes(sizes, num_replicas) if size * context < 6000]
    each = max(6, round(16 * effort))
    return found + [_mixed(concurrency * num_replicas, each * num_replicas, longest) for concurrency in
                    (MIXED_CONCURRENCY if effort >= 1 else MIXED_CONCURRENCY[:1])]  # fmt: skip


def _sizes(sizes: Sequence[int], num_replicas: int) -> list[int]:
    """1 keeps the other replicas idle."""
    return sorted({1, *(size * num_replicas for size in sizes)}) if num_replicas > 1 else list(sizes)


def _workload(name: str, prompt: Lengths, output: Lengths, process: str = "burst") -> Workload:
    return Workload(name=name, title=name, parts=(Part(prompt, output),), arrival=Arrival(process))


def _prefills(lengths: Sequence[int], times: int) -> Phase:
    """Answers of four tokens: a lone prompt's first token, and decodes of one."""
    workload = _workload("calibrate-prefill", Lengths("choice", choices=tuple(lengths)), Lengths("constant", tokens=4))
    return Phase("prefills, one at a time", workload, len(lengths) * times, concurrency=1)


def _decodes(size: int, context: int) -> Phase:
    workload = _workload(
        "calibrate-decode", Lengths("constant", tokens=context), Lengths("constant", tokens=DECODED_TOKENS)
    )
    return Phase(f"{size} decodes from {context} tokens", workload, size)


def _mixed(concurrency: int, num_requests: int, longest: int) -> Phase:
    prompts = Lengths("uniform", min_tokens=8, max_tokens=max(16, min(640, longest // 2)))
    answers = Lengths("uniform", min_tokens=4, max_tokens=max(8, min(40, longest // 4)))
    workload = _workload("calibrate-mixed", prompts, answers)
    return Phase(f"{concurrency} unequal requests at a time", workload, num_requests, concurrency)
