"""TTFT and TPOT of a closed loop in closed form: c requests in flight, each answered one followed by the next.

In one request's life of T seconds the engine prefills everybody's prompt once and takes output − 1 decode steps for
all. Prompts that arrive during a step are taken into the next one together, so a step that carries prompts carries
b = λ·s ÷ (1 − e^(−λ·s)) of them, for λ = n/T arrivals a second and s seconds of such a step (Poisson arrivals). With q
the share of a prompt in what they add, t the time of a decode step at the mean context, n requests a replica:
    D = (output − 1) · t(n·D/T) + (n − b) · (D/T) · q        decoding, interrupted by the others' prompts
    F = own steps + t/2 + queue · own                        own chunks, the step under way, prompts ahead
    T = D + F
solved by iteration. A benchmark that starts its c clients at once has a burst in front: there a prompt waits for half
of the others. Written with operators only, so that the fit runs it over arrays of rows and a prediction over floats.

Through p stages the requests go round as p micro-batches, and none overtakes another: behind a prompt all of them go at
the pace of its chunks, so that it costs a round of l = chunks + p − 1 of their intervals instead of a decode's (the
fill and drain of a pipeline; Narayanan et al. 2021). Of that it shares what other prompts use too: when each
micro-batch takes a prompt along with probability w, slow rounds begin 1 + w (l − 1) times less often than prompts come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.plan.work import StepWork

Seconds = Callable[[StepWork], Any]
_ITERATIONS = 5
_E = 2.718281828459045


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
    own_s: Any = 0.0
    """Of the TTFT: the steps that carry the prompt."""
    step_s: Any = 0.0
    """Between two plans while nobody prefills: what an arrival waits for is anywhere in it."""


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


def prefill_work(prompt: Any, chunks: Any, prompts: Any, window: Any, decodes: Any, context: Any) -> StepWork:
    """One of the steps of prompts in `chunks` steps, the mean one, beside `decodes` running sequences. More than one of
    the `prompts` share a step only where each takes one."""
    share = prompts / chunks
    inside = smaller(prompt, window)
    window_pairs = inside * (inside + 1) / 2 + (prompt - inside) * inside
    return StepWork(
        prefill_tokens=prompt * share, prefill_seqs=prompts, prefill_pairs=prompt * (prompt + 1) / 2 * share,
        prefill_window_pairs=window_pairs * share, prefill_context=prompt * (chunks - 1) / (2 * chunks) * prompts,
        decodes=decodes, decode_context=decodes * context, decode_window_context=decodes * smaller(context, window),
        logits=decodes + share,
    )  # fmt: skip


def joined(arrivals: Any) -> Any:
    """How many come together where one comes at all, of Poisson arrivals with that mean."""
    return arrivals / (1 - _E ** (-arrivals))


def _coming(
    requests: Any, life: Any, through: Any, pause: Any, ended: Any, most: Any, stages: int, at_random: bool
) -> tuple[Any, Any, Any]:
    """(prompts while one passes all stages, while a micro-batch of decodes passes one, how many go together at most).

    `ended`: answers that a round ends, be it a slow or a fast one."""
    if stages == 1:
        return requests / life * through, 0.0, most
    if at_random:
        return requests / life * through, requests / life * pause, requests * 1.0
    return ended / stages, ended / stages, most


def closed_loop(
    seconds: Seconds, *, prompt: Any, output: Any, requests: Any, budget: Any, window: Any, request_s: Any,
    queue_share: Any, mixed: Any = 1.0, burst_share: Any = 0.0, wait_steps: Any = 0.0, clump_share: Any = 0.0,
    interval: Seconds | None = None, stages: int = 1, at_random: bool = False,
) -> Loop:  # fmt: skip
    """`seconds`: of a micro-batch's step through all stages; `interval`: until the next may follow it (the same without
    stages). `requests`: in flight on a replica. `budget`: tokens of a step. `window`: the model's sliding window (or a
    number above every context). `mixed`: 1 where chunks ride with decodes, 0 where prompts run alone. `burst_share`: of
    the requests that start together (1 ÷ rounds of a benchmark that starts all its clients at once). `wait_steps`: for
    how many steps an engine holds a prompt back for others to join it (TensorRT-LLM's batch_wait_timeout_iters).
    `clump_share`: where all answers are equally long, prompts that were taken together end and come back together: how
    much of the largest possible batch they keep, 0 where lengths vary. `at_random`: prompts come when they come, not
    when a step has ended an answer; through stages a slow round ends no more answers than a fast one."""
    context = prompt + output / 2
    chunks = -(-prompt // larger(budget - mixed * requests / stages, budget / 8))
    most = larger(smaller(requests * 1.0, budget / prompt) // 1, 1.0)

    def timed(work: StepWork) -> tuple[Any, Any]:
        """(through all stages, until the next may follow)."""
        through = seconds(work)
        return through, interval(work) if interval is not None else through

    def carrying(prompts: Any, decodes: Any) -> tuple[Any, Any]:
        return timed(prefill_work(prompt, chunks, prompts, window, decodes / stages, context))

    through, gap = carrying(most, 0.0 * requests)
    together = request_s + through + (chunks - 1) * gap + chunks * gap * (requests / most - 1) / 2
    clump = 1 + clump_share * (most - 1)
    decoding, prompts, life, sharing = requests * 1.0, clump, 0.0, 1.0
    for turn in range(_ITERATIONS):
        through, pause = timed(decode_work(decoding / stages, context, window))
        step = larger(through, stages * pause)
        each = smaller(prompts, most)  # of those that come together, in one step; the others' steps follow it
        through, gap = carrying(each, mixed * decoding)
        own, behind = through + (chunks - 1) * gap, chunks * (prompts / each - 1)
        run, decodes = own + behind * gap, step + (chunks - 1 + behind) * pause
        added = larger(run - mixed * decodes, 0.0) / prompts / sharing
        life = output * step + requests * added + own if turn == 0 else life
        others = requests * 1.0 if at_random else larger(requests - prompts, 0.0)
        ahead = queue_share * smaller(others * added / life, 0.95)
        queue = own * ahead / (1 - ahead)
        first = request_s + own + (0.5 + wait_steps) * step / stages + queue
        met = 1.0 if at_random else larger(life - first, 0.0) / life  # those that come during its prefill wait for it
        decode = (output - 1) * step + others * added * met
        life = (life + first + decode) / 2
        decoding = larger(requests * decode / (first + decode), 1.0)
        ended = decoding / (output - 1)
        arrivals, coming, room = _coming(requests, life, through, pause, ended, most, stages, at_random)
        sharing = 1 + (1 - _E ** (-coming)) * (chunks + stages - 2)
        prompts = smaller(larger(joined(larger(arrivals, 1e-6)), clump), room)
    ttft = burst_share * larger(together, first) + (1 - burst_share) * first
    return Loop(
        ttft, decode / (output - 1), ttft - (first - queue), added, together, decoding, own, step / stages
    )  # fmt: skip
