"""Lesson 04: context parallelism. A sequence is shared out by position: its queries while it is read, its KV while it
is kept.

The first exercise puts partial attention together in NumPy, safely; the second says which queries a rank computes.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.lab import Run
from labkit.layout import (
    Crossing,
    Layout,
    StepShape,
    check_layout,
    kv_bytes_per_token,
    kv_heads,
    query_loads,
    step_card,
    zigzag,
)
from labkit.load.lengths import Lengths
from labkit.load.workload import Part, Workload
from labkit.measure.breakdown import phase_of
from labkit.measure.crossings import Crossings, crossings
from labkit.measure.metrics import ttft_ms
from labkit.measure.records import StepRecord
from labkit.model.spec import load_spec, model_dir
from labkit.paths import home_dir
from labkit.teach.beside import beside
from labkit.teach.card import five_questions
from labkit.teach.checks import Check, Problem, show_check
from labkit.teach.html import Table
from labkit.teach.lesson import Lesson
from labkit.teach.readings import at_once
from labkit.teach.reference import ReferenceCase

__all__ = ["beside", "five_questions"]

Array = NDArray[np.float64]
Share = tuple[Array, Array, Array]
"""Of each query over a share of the keys: maximum [T], total [T] = Σ exp(s − maximum), weighted [T, D] with values."""
NOT_FOUND = "not found in this range"


# ---- the merge, by hand


def make_scores(seed: int = 0, scale: float = 1.0) -> tuple[Array, Array]:
    """scores (4 queries, 12 keys) and values (12 keys, 3), drawn from a normal; scores times `scale`."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((4, 12)) * scale, rng.standard_normal((12, 3))


def attend(scores: Array, values: Array) -> Array:
    """Attention over all keys at once: softmax(scores) @ values."""
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights @ values / weights.sum(axis=1, keepdims=True)


def share_of(scores: Array, values: Array) -> Share:
    """What one rank makes of its keys; without any, maximum −∞ and sums of 0."""
    maximum = scores.max(axis=1, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(maximum), maximum, 0.0)[:, None])
    return maximum, weights.sum(axis=1), weights @ values


def merge(shares: Sequence[Share]) -> Array:
    """The solution: attention over the keys of all shares, [T, D]; 0 for a query that saw none."""
    maxima = np.stack([maximum for maximum, _, _ in shares])
    highest = maxima.max(axis=0)
    factors = np.exp(maxima - np.where(np.isfinite(highest), highest, 0.0))
    total = sum(factor * total for factor, (_, total, _) in zip(factors, shares, strict=True))
    weighted = sum(factor[:, None] * weighted for factor, (_, _, weighted) in zip(factors, shares, strict=True))
    return np.asarray(weighted / np.where(total == 0, 1.0, total)[:, None])


def split(scores: Array, values: Array, *cuts: int) -> list[Share]:
    """The shares of ranks whose keys begin at 0 and at each of `cuts`."""
    edges = [0, *cuts, len(values)]
    return [share_of(scores[:, a:b], values[a:b]) for a, b in zip(edges, edges[1:], strict=False)]


def check_merge(function: Callable[..., Any]) -> Check:
    """Held against attention that was never split."""
    cases = [
        _merge_case("two shares of one length", 1.0, 6),
        _merge_case("three shares of different lengths", 1.0, 1, 5),
        _merge_case("an empty share among them", 1.0, 0, 7),
        _merge_case("scores of ±10,000, as float32 logits can be", 1e4, 6),
        _merge_case("four shares of such scores, one empty", 1e4, 3, 3, 9),
    ]
    blind, values = make_scores(3)
    blind[0] = -np.inf
    seen = np.vstack([np.zeros((1, values.shape[1])), attend(blind[1:], values)])
    cases.append(Problem((split(blind, values, 6),), seen, "a query that may see no key: 0, not nan", "a hidden row"))
    return show_check(function, cases)


def _merge_case(why: str, scale: float, *cuts: int) -> Problem:
    scores, values = make_scores(7, scale=scale)
    return Problem((split(scores, values, *cuts),), attend(scores, values), why, f"12 keys, cut at {list(cuts)}")


# ---- whose queries


def queries_of(num_tokens: int, num_ranks: int, rank: int) -> tuple[range, range]:
    """The solution, for num_tokens that 2 · num_ranks divides: an early part and a late one."""
    size = num_tokens // (2 * num_ranks)
    return range(rank * size, (rank + 1) * size), range(num_tokens - (rank + 1) * size, num_tokens - rank * size)


def check_queries_of(function: Callable[..., Any]) -> Check:
    """Held against what the engine's ranks compute."""
    cases = (
        (16, 2, 0, "the first rank begins, and ends"),
        (16, 2, 1, "the second has the middle"),
        (64, 4, 2, "the third of four"),
        (512, 1, 0, "one rank has all of it, in two parts"),
    )
    return show_check(function, [Problem(case[:3], zigzag(*case[:3]), case[3]) for case in cases])


def balance_table(run: Run) -> Table:
    """Keys seen by the queries of each pcp rank: contiguous and zig-zag by arithmetic, and as the steps recorded it."""
    layout, (shape, steps) = Layout.parse(run.summary["layout"]), largest_steps(run, "prefill")
    tokens, pcp = shape.prefill_tokens, layout.pcp
    each = tokens // pcp
    plain = [sum(range(i * each + 1, (tokens if i == pcp - 1 else (i + 1) * each) + 1)) for i in range(pcp)]
    rows = [
        [name, *(f"{load:,}" for load in loads), f"{statistics.mean(loads) / max(loads):.1%}"]
        for name, loads in (
            ("a contiguous half each (arithmetic)", plain),
            ("early and late (arithmetic)", query_loads(layout, 0, tokens)),
            ("early and late (recorded)", steps[0].query_keys),
        )
    ]
    columns = ["query × key pairs of a layer", *(f"pcp rank {i}" for i in range(pcp)), "mean ÷ largest"]
    return Table(f"A prompt of {tokens} tokens over {pcp} ranks", columns, rows)


# ---- TTFT by prompt length


def by_length(lengths: Sequence[int], answer: int = 2) -> Workload:
    """Prompts of just these lengths, equally often."""
    parts = tuple(
        Part(Lengths("constant", tokens=n), Lengths("constant", tokens=answer), name=f"{n} tokens") for n in lengths
    )
    return Workload(name="by-length", title="Prompts of a few lengths, short answers", parts=parts)


def ttft_by_length(run: Run) -> dict[int, list[float]]:
    """Prompt tokens → TTFT of every completed request of that length in ms, both ascending."""
    found: dict[int, list[float]] = {}
    for record in run.records:
        value = ttft_ms(record) if record.status == "completed" else None
        if value is not None:
            found.setdefault(record.prompt_tokens, []).append(value)
    return {length: sorted(found[length]) for length in sorted(found)}


def crossover(challenger: Run, incumbent: Run) -> float | str:
    """From which prompt length on the challenger's median TTFT is the lower one.

    Interpolated between the last length at which it was not and the next; a sentence where there is no such place.
    """
    mine, theirs = (_medians(run) for run in (challenger, incumbent))
    gaps = [(length, mine[length] - theirs[length]) for length in sorted(mine.keys() & theirs.keys())]
    if not gaps or gaps[-1][1] >= 0:
        return NOT_FOUND
    later = [at for at, (_, gap) in enumerate(gaps) if gap >= 0]
    if not later:
        return f"below {gaps[0][0]}"
    (a, above), (b, below) = gaps[later[-1]], gaps[later[-1] + 1]
    return float(round(a + (b - a) * above / (above - below)))


def _medians(run: Run) -> dict[int, float]:
    return {length: statistics.median(values) for length, values in ttft_by_length(run).items()}


def least_n(*runs: Run) -> int:
    """Requests of the length that has fewest, over all runs."""
    return min((len(values) for run in runs for values in ttft_by_length(run).values()), default=0)


# ---- what crosses


def largest_steps(run: Run, phase: str) -> tuple[StepShape, list[StepRecord]]:
    """The run's largest pure steps of a phase, which are alike, so that they can be held against a card to the byte,
    and their shape. ValueError when it had none.
    """
    steps = [step for step in run.step_records if phase_of(step) == phase and step.ranks]
    if not steps:
        raise ValueError(f"Run {run.run_id} had no pure {phase} step: keep one request in flight, or ask for more.")
    size = max((step.prefill_tokens, step.num_decode_seqs) for step in steps)
    return StepShape(*size), [step for step in steps if (step.prefill_tokens, step.num_decode_seqs) == size]


def operations(run: Run, phase: str, axis: str) -> list[Crossings]:
    """Of an axis in the largest steps of a phase, by kind."""
    _, steps = largest_steps(run, phase)
    rows = run.collectives
    found = crossings(rows[rows["step_id"].isin([step.step_id for step in steps])], steps, by_op=True)
    return [each for each in found if each.axis == axis]


def of_a_rank(run: Run, each: Crossings) -> float:
    """How often a rank takes part in it in a step."""
    return each.per_step / at_once(Layout.parse(run.summary["layout"]), each.axis, each.op)


def sent_bytes(run: Run, phase: str, axis: str) -> float:
    """That a rank sends in one of the largest steps, by ring algorithms; logits left out."""
    degree, total = getattr(Layout.parse(run.summary["layout"]), axis), 0.0
    for each in operations(run, phase, axis):
        one = Crossing("isend" if each.op == "send" else each.op, 1, round(each.bytes_each), "")
        total += of_a_rank(run, each) * one.wire_bytes(degree) * (each.op != "gather")
    return total


def traffic_table(runs: dict[str, Run], phase: str, axis: str) -> Table:
    """The operations of one axis in the largest steps of each run, logits left out; counted and weighed."""
    rows, shapes = [], set()
    for label, run in runs.items():
        shape = largest_steps(run, phase)[0]
        shapes.add(shape.prefill_tokens or shape.decode_seqs)
        for at, each in enumerate(each for each in operations(run, phase, axis) if each.op != "gather"):
            sent = f"{sent_bytes(run, phase, axis) / 1024:,.1f} KiB" if at == 0 else ""
            times, size = f"{of_a_rank(run, each):g}", f"{each.bytes_each:,.0f} B"
            rows.append([label if at == 0 else "", each.op, times, size, sent])
    size = " and ".join(f"{count:,} row{'s' * (count != 1)}" for count in sorted(shapes))
    columns = ["layout", "operation", "in a step", "a rank gives", "a rank sends in the step"]
    remark = "Counted from the recorded operations; sent, as ring algorithms send it."
    return Table(f"What crosses on {axis} in a {phase} step of {size}", columns, rows, [remark])


def expected(case: ReferenceCase, run: Run, phase: str, axis: str) -> int:
    """How many operations of an axis the card has for one of the largest steps."""
    shape, _ = largest_steps(run, phase)
    cards = {c.axis: c for c in step_card(Layout.parse(run.summary["layout"]), case.spec, shape, case.dtype_bytes)}
    return sum(op.count for op in cards[axis].ops)


def per_step(run: Run, phase: str, axis: str) -> float:
    """Operations of an axis that one of the largest steps had."""
    return sum(of_a_rank(run, each) for each in operations(run, phase, axis))


# ---- capacity


def few_kv_heads(model: str, num_kv_heads: int = 1) -> str:
    """A folder with the model's shapes and so few KV heads that TP must copy them; its weights are random."""
    config = json.loads((model_dir(model) / "config.json").read_text(encoding="utf-8"))
    config["num_key_value_heads"] = num_kv_heads
    folder = home_dir() / "models" / f"{Path(model).name}-{num_kv_heads}kv"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return str(folder)


def resident_tokens(lesson: Lesson, layout: str) -> int:
    """KV tokens that all replicas have room for, as the ranks agreed on it when the layout came up."""
    lesson.switch(layout)
    return sum(each["kv_total_blocks"] * each["kv_block_tokens"] for each in lesson.lab.state()["replicas"])


def copies_table(model: str, layouts: Sequence[str]) -> Table:
    """Who holds which KV head, and what a token takes on a rank: for layouts of one model."""
    spec, rows = load_spec(model), []
    for layout in map(Layout.parse, layouts):
        answer = check_layout(layout, spec)
        if not answer:
            rows.append([str(layout), "refused", "", "; ".join(answer.reasons)])
            continue
        heads = "; ".join(f"rank {r}: {_heads(layout, spec, r)}" for r in range(min(4, layout.world_size)))
        size = kv_bytes_per_token(layout, spec, 0, spec.dtype_bytes)
        rows.append([str(layout), heads, f"{size:,} B", ""])
    title = f"{spec.name}: {spec.num_heads} query heads, {spec.num_cached_heads} KV heads"
    columns = ["layout", "KV heads", "of a token, on a rank", "why not"]
    return Table(title, columns, rows, ["Predicted, from the shapes."])


def _heads(layout: Layout, spec: Any, rank: int) -> str:
    mine = kv_heads(layout, spec, rank)
    return f"head {mine.start}" if len(mine) == 1 else f"heads {mine.start} to {mine.stop - 1}"
