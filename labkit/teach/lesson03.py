"""Lesson 03: pipeline parallelism. Layers are dealt out to stages; a stage without a step is a bubble.

The first exercise is the idle share of each stage, from its time and the steps in flight; the second deals layers out
so that the slowest stage is as fast as can be.
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from labkit.lab import Run
from labkit.layout import Layout, ModelProfile, PartCost, StepShape, balance_stages, step_card
from labkit.load.lengths import Lengths
from labkit.load.workload import Part, Workload
from labkit.measure.breakdown import phase_of
from labkit.measure.records import StepRecord
from labkit.teach.beside import beside, two_nodes
from labkit.teach.card import five_questions
from labkit.teach.checks import Check, Problem, show_check
from labkit.teach.html import Table
from labkit.teach.lesson import Lesson
from labkit.teach.readings import message_us, messages
from labkit.teach.reference import MIB, ReferenceCase

__all__ = ["beside", "five_questions", "two_nodes"]
HEAVY = "lab-heavy-head"
"""10 small layers, and a head that takes as long as several of them."""


def prompts_of(num_tokens: int, answer: int = 8) -> Workload:
    """Prompts of one length and short answers: prefill is nearly all of the work."""
    part = Part(prompt_tokens=Lengths("constant", tokens=num_tokens), output_tokens=Lengths("constant", tokens=answer))
    return Workload(name=f"prompts-{num_tokens}", title=f"Prompts of {num_tokens} tokens", parts=(part,))


# ---- exercise 1: bubbles


def idle_shares(stage_ms: Sequence[float], in_flight: int) -> list[float]:
    """The solution: the share of time in which each stage has nothing to do, in the steady state."""
    steps_per_ms = min(in_flight / sum(stage_ms), 1 / max(stage_ms))
    return [1 - ms * steps_per_ms for ms in stage_ms]


def check_idle_shares(function: Callable[..., Any]) -> Check:
    """Held against a pipeline that is stepped through, one step after another."""
    return show_check(function, [Problem(args, _stepped(*args), why) for args, why in _BUBBLES])


_BUBBLES = (
    (([20.0, 20.0], 1), "one step in flight: each stage works while the other waits"),
    (([20.0, 20.0], 2), "as many as stages: no bubble"),
    (([20.0, 20.0], 5), "more than stages: the rest stands in line"),
    (([10.0, 10.0, 10.0, 10.0], 3), "one fewer than stages"),
    (([30.0, 10.0], 2), "unequal stages: the slower one sets the pace"),
    (([30.0, 10.0, 20.0], 1), "unequal stages, one step in flight"),
)


def _stepped(stage_ms: Sequence[float], in_flight: int, num_rounds: int = 400) -> list[float]:
    """Each of `in_flight` steps goes through the stages in order and begins again when it is through.

    A stage takes them as they come, one at a time. Shares are of the second half, when the start is forgotten.
    """
    free, done = [0.0] * len(stage_ms), [0.0] * in_flight
    ends: list[list[float]] = [[] for _ in stage_ms]
    for turn in range(num_rounds * in_flight):
        now = done[turn % in_flight]
        for stage, ms in enumerate(stage_ms):
            now = max(now, free[stage]) + ms
            free[stage] = now
            ends[stage].append(now)
        done[turn % in_flight] = now
    half = len(ends[0]) // 2
    return [1 - ms * (len(at) - half) / (at[-1] - at[half - 1]) for ms, at in zip(stage_ms, ends, strict=True)]


# ---- exercise 2: who holds which layers


def stage_split(layer_ms: Sequence[float], embedding_ms: float, head_ms: float, num_stages: int) -> list[int]:
    """The solution: layers of each stage, so that the slowest stage is fastest."""

    def slowest(split: list[int]) -> float:
        ends = [0, *itertools.accumulate(split)]
        times = [sum(layer_ms[start:end]) for start, end in itertools.pairwise(ends)]
        times[0] += embedding_ms
        times[-1] += head_ms
        return max(times)

    inner = itertools.combinations(range(1, len(layer_ms)), num_stages - 1)
    cuts = ([0, *cut, len(layer_ms)] for cut in inner)
    return min(([end - start for start, end in itertools.pairwise(cut)] for cut in cuts), key=slowest)


def check_stage_split(function: Callable[..., Any]) -> Check:
    """Held against `labkit balance`'s own choice, by the ms of the slowest stage: several splits may be as good."""

    @functools.wraps(function)
    def slowest_ms(*args: Any) -> float:
        split = function(*args)
        return max(stage.seconds for stage in _profile(*args[:3]).stages(tuple(split)))

    return show_check(slowest_ms, [_split_case(args, why) for args, why in _SPLITS])


_SPLITS: tuple[tuple[tuple[list[float], float, float, int], str], ...] = (
    (([1.0] * 8, 0.0, 0.0, 2), "nothing but layers: an equal split"),
    (([1.0] * 10, 0.1, 4.0, 2), "a heavy head"),
    (([1.0] * 10, 2.5, 0.0, 2), "a heavy embedding"),
    (([1.0] * 7, 0.2, 1.5, 3), "three stages, and layers that do not divide"),
    (([1.0, 1.0, 1.0, 4.0, 1.0, 1.0], 0.0, 0.5, 3), "one layer slower than the others"),
)


def _profile(layer_ms: Sequence[float], embedding_ms: float, head_ms: float) -> ModelProfile:
    return ModelProfile(PartCost(embedding_ms), tuple(map(PartCost, layer_ms)), PartCost(head_ms))


def _split_case(args: tuple[list[float], float, float, int], why: str) -> Problem:
    best = balance_stages(_profile(*args[:3]), args[3])
    return Problem(args, best.slowest_s, why, f"{len(args[0])} layers, {args[1:]}")


def measure_balance(model: str, num_seqs: int, context: int = 128, pp: int = 2) -> dict[str, Any]:
    """What `labkit balance MODEL --json` says: it holds the model in a process of its own."""
    words = ["balance", model, "--pp", str(pp), "--seqs", str(num_seqs), "--context", str(context), "--json"]
    done = subprocess.run([sys.executable, "-m", "labkit.cli", *words], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr.strip())
    return dict(json.loads(done.stdout))


def splits_table(balance: dict[str, Any], runs: dict[str, Run]) -> Table:
    """The equal split and the measured one: what `labkit balance` expects of each stage, and what the run's took."""
    rows = []
    for (label, run), name in zip(runs.items(), ("equal", "measured"), strict=True):
        for stage, expected in enumerate(balance[name]["stage_ms"]):
            took, share = stage_ms(run)[stage], run.summary["pipeline"]["stages"][stage]["idle"]
            slow = "the slowest" if stage == slowest_stage(run) else ""
            rows.append(
                [label if not stage else "", f"stage {stage}", f"{balance[name]['split'][stage]} layers"]
                + [f"{expected:.1f} ms", f"{took:.1f} ms", f"{share:.0%}", slow]
            )
    columns = ["layout", "", "holds", "by labkit balance", "in the run", "idle", ""]
    remark = "By labkit balance: one rank, part by part. In the run: median work of a decode step, calls included."
    return Table("The equal split and the measured one", columns, rows, [remark])


# ---- from runs


def stage_ms(run: Run, phase: str = "decode") -> list[float]:
    """Median ms that each stage works on a step of that phase: its slowest rank's compute, wait and transfer."""
    steps = [step for step in run.step_records if phase_of(step) == phase]
    pp = Layout.parse(run.summary["layout"]).pp
    return [statistics.median(_work_ms(step, stage) for step in steps) for stage in range(pp)]


def _work_ms(step: StepRecord, stage: int) -> float:
    layout = Layout.parse(step.layout)
    at = [i for i in range(len(step.ranks)) if layout.coords(i).pp == stage]
    return max(step.compute_ns[i] + step.wait_ns[i] + step.transfer_ns[i] for i in at) / 1e6


def slowest_stage(run: Run) -> int:
    times = stage_ms(run)
    return times.index(max(times))


def mean_idle(run: Run) -> float:
    """Share of the run in which a stage did nothing, mean over the stages."""
    return statistics.fmean(stage["idle"] for stage in run.summary["pipeline"]["stages"])


def num_steps(run: Run, phase: str = "") -> int:
    return sum(not phase or phase_of(step) == phase for step in run.step_records)


def prompt_idle(run: Run) -> float:
    """Share of a prompt's prefill, from its first chunk's start to its last one's end, in which a stage had nothing.

    For runs of one request at a time; the median over prompts of the mean over stages.
    """
    return statistics.median(map(_idle_between, _prompts(run)))


def _prompts(run: Run) -> list[list[StepRecord]]:
    """The prefill steps of each prompt: a decode step lies between two prompts."""
    ordered = sorted(run.step_records, key=lambda step: step.step_id)
    groups = itertools.groupby(ordered, key=lambda step: phase_of(step) == "prefill")
    return [list(steps) for is_prefill, steps in groups if is_prefill]


def _idle_between(steps: Sequence[StepRecord]) -> float:
    span = max(max(step.rank_end_ns) for step in steps) - min(min(step.rank_start_ns) for step in steps)
    busy = sum(sum(step.compute_ns) + sum(step.wait_ns) + sum(step.transfer_ns) for step in steps)
    return 1 - busy / (span * len(steps[0].ranks))


def fill_and_drain(num_chunks: int, num_stages: int) -> float:
    """The least idle share of a prompt of equal chunks that meets an empty pipeline: it must fill, and drain."""
    return (num_stages - 1) / (num_chunks + num_stages - 1)


def transfer_share(run: Run, phase: str = "prefill") -> float:
    """Of the ranks' time while a step of that phase was under way: in transfers, by the recorder."""
    return float(run.summary["step_share"]["by_phase"][phase]["transfer"])


# ---- the same prompts over several paths

Measured = dict[tuple[str, int], Run]
"""(layout, prompt tokens) → its run."""


def measure_prompts(lesson: Lesson, where: str, lengths: Sequence[int], **settings: Any) -> Measured:
    """TP2 and PP2 on prompts of each length, one at a time, on the lesson's server."""
    load: dict[str, Any] = {"concurrency": 1, "num_requests": lesson.size(1, 16), "settings": settings}
    return {
        (layout, tokens): lesson.run(layout, prompts_of(tokens), label=f"{layout}, {tokens} tokens, {where}", **load)
        for layout in ("tp2", "pp2")
        for tokens in lengths
    }


def sooner(runs: Measured, tokens: int) -> str | None:
    """The layout with the smaller TTFT p50; None where nothing was measured."""
    found = {run.summary["ttft_ms"]["p50"]: layout for (layout, length), run in runs.items() if length == tokens}
    return found[min(found)] if found else None


def ttft_ms(runs: Measured, layout: str, tokens: int) -> float | None:
    return float(runs[layout, tokens].summary["ttft_ms"]["p50"]) if runs else None


def link_ms(case: ReferenceCase, layout: str, tokens: int, bits_per_s: float) -> float:
    """Least ms that a link of that rate needs for what one rank sends while such a prompt is prefilled."""
    cards = step_card(Layout.parse(layout), case.spec, StepShape(prefill_tokens=tokens), case.dtype_bytes)
    return sum(card.wire_bytes for card in cards) * 8 / bits_per_s * 1e3


def links_table(places: dict[str, Measured]) -> Table:
    """TTFT p50 of each layout and prompt length on each path between the ranks, and the transfer share of prefill."""
    keys = sorted({key for runs in places.values() for key in runs}, key=lambda key: (key[1], key[0]))
    rows = []
    for layout, tokens in keys:
        cells = [
            f"{runs[layout, tokens].summary['ttft_ms']['p50']:.0f} ms, {transfer_share(runs[layout, tokens]):.0%}"
            for runs in places.values()
            if runs
        ]
        n = min(runs[layout, tokens].summary["ttft_ms"]["n"] for runs in places.values() if runs)
        rows.append([f"{tokens} tokens", str(Layout.parse(layout)), *cells, str(n)])
    columns = ["prompt", "layout", *(name for name, runs in places.items() if runs), "n"]
    remark = "TTFT p50, and the share of the ranks' time in prefill steps that went into transfers."
    return Table("The same prompts, one path after another", columns, rows, [remark])


def decode_messages(places: dict[str, Measured], tokens: int) -> Table:
    """Messages between ranks in a decode step: how large, how many, and how long one takes on each path."""
    rows = []
    for name, runs in places.items():
        for layout in ("tp2", "pp2") if runs else ():
            run = runs[layout, tokens]
            (kind,) = messages(run, "decode")
            rows.append(
                [name, str(Layout.parse(layout)), f"{kind.bytes_each:,.0f} B", f"{message_us(run):.0f} µs"]
                + [f"{kind.per_step:.0f}", f"{run.summary['tpot_ms']['p50']:.1f} ms"]
            )
    columns = ["path", "layout", "one message", "its transfer, median", "messages a step", "TPOT p50"]
    return Table("Decode: small messages", columns, rows)


def crossings_table(runs: dict[str, Run], groups: dict[str, list[dict[str, Any]]]) -> Table:
    """What each axis of each run moved in a prefill step, over which fabric, and whether that spans nodes.

    groups: label → `lab.state()["groups"]` under that layout.
    """
    rows = []
    for label, run in runs.items():
        for kind in messages(run, "prefill"):
            carried = [group for group in groups[label] if group["axis"] == kind.axis]
            across = "across nodes" if any(group["spans_nodes"] for group in carried) else "within a node"
            fabrics = ", ".join(sorted({group["fabric"] for group in carried}))
            rows.append([label, kind.axis, fabrics, across, f"{kind.per_step:.0f}", f"{kind.bytes_each / MIB:.2f} MiB"])
    columns = ["layout", "axis", "fabric", "", "messages in a prefill step", "each of"]
    remark = "Counted from the recorded collectives, all groups together; logits left out."
    return Table("What crosses, and where", columns, rows, [remark])
