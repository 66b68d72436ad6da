"""TTFT and TPOT of a closed loop in closed form: c requests in flight, each answered one followed by the next.

In one request's life of T seconds the engine prefills everybody's prompt once and takes output − 1 decode steps for
all. With q the time that a prompt's chunks add to the steps that carry them, t the time of a decode step at the mean
context, n requests a replica:
    D = (output − 1) · t(n·D/T) + (n − 1) · (D/T) · q        decoding, interrupted by the others' prompts
    F = q_own + t/2 + queue · (n − 1) · F/T · q              own chunks, the step under way, prompts ahead
    T = D + F
solved by iteration. A benchmark that starts its c clients at once has a burst in front: there a prompt waits for half
of the others. Written with operators only, so that the fit runs it over arrays of rows and a prediction over floats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.plan.work import StepWork

Seconds = Callable[[StepWork], Any]
_ITERATIONS = 12


@dataclass(frozen=True, slots=True)
class Loop:
    """What the equations give, in seconds (floats, or arrays of rows)."""

    ttft_s: Any
    tpot_s: Any
    queue_s: Any
    """Of the TTFT: waiting for others' prompts, and the burst."""
    prefill_s: Any
    """What a prompt adds to the steps that carry it."""
    burst_s: Any
    """Mean TTFT of clients that start together."""
    decoding: Any
    """Requests of a replica that decode, on average."""


def larger(a: Any, b: Any) -> Any:
    return (a + b + abs(a - b)) / 2


def smaller(a: Any, b: Any) -> Any:
    return (a + b - abs(a - b)) / 2


def decode_work(decodes: Any, context: Any, window: Any) -> StepWork:
    """A step of `decodes` sequences with `context` cached tokens each."""
    seen = smaller(context, window)
    return StepWork(
        decodes=decodes, decode_context=decodes * context, decode_window_context=decodes * seen, logits=decodes
    )


def chunk_work(prompt: Any, chunks: Any, window: Any, decodes: Any, context: Any) -> StepWork:
    """One of the `chunks` steps of a prompt, the mean one, beside `decodes` running sequences."""
    pairs = prompt * (prompt + 1) / 2
    inside = smaller(prompt, window)
    window_pairs = inside * (inside + 1) / 2 + (prompt - inside) * inside
    return StepWork(
        prefill_tokens=prompt / chunks, prefill_seqs=1, prefill_pairs=pairs / chunks,
        prefill_window_pairs=window_pairs / chunks, prefill_context=prompt * (chunks - 1) / (2 * chunks),
        decodes=decodes, decode_context=decodes * context, decode_window_context=decodes * smaller(context, window),
        logits=decodes + 1 / chunks,
    )  # fmt: skip


def closed_loop(
    seconds: Seconds, *, prompt: Any, output: Any, requests: Any, budget: Any, window: Any, request_s: Any,
    queue_share: Any, mixed: Any = 1.0, burst_share: Any = 0.0,
) -> Loop:  # fmt: skip
    """`requests`: in flight on a replica. `budget`: tokens of a step. `window`: the model's sliding window (or a number
    above every context). `mixed`: 1 where chunks ride with decodes, 0 where prompts run alone. `burst_share`: of the
    requests that start together (1 ÷ rounds of a benchmark that starts all its clients at once)."""
    context = prompt + output / 2
    chunks = -(-prompt // larger(budget - mixed * requests, budget / 8))
    decoding, life = requests * 1.0, 1.0
    alone = chunks * seconds(chunk_work(prompt, chunks, window, 0.0, context))
    for _ in range(_ITERATIONS):
        step = seconds(decode_work(decoding, context, window))
        beside = seconds(chunk_work(prompt, chunks, window, decoding, context))
        added = mixed * chunks * larger(beside - step, 0 * step) + (1 - mixed) * alone
        own = mixed * chunks * beside + (1 - mixed) * alone
        steady = output * step + requests * added + own  # a first guess of T, and a floor of it
        life = larger(steady, life) if _ == 0 else life
        others = smaller((requests - 1) * added / life, 0.95 + 0 * step)
        queue = queue_share * others * own / (1 - queue_share * others)
        first = request_s + own + step / 2 + queue
        decode = (output - 1) * step + (requests - 1) * added * larger(life - first, 0 * step) / life
        life = (life + first + decode) / 2
        decoding = larger(requests * decode / (first + decode), 1.0 + 0 * step)
    together = request_s + alone * (requests + 1) / 2 + (requests - 1) * 0
    ttft = burst_share * larger(together, first) + (1 - burst_share) * first
    return Loop(ttft, decode / (output - 1), ttft - (first - queue), added, together, decoding)
