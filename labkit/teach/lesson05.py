"""Lesson 05: expert parallelism. Whole experts on ranks, tokens on the way; who has popular experts is late.

The exercises are the bytes of an all-to-all, from a routing table, and a placement that spreads a measured load.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.lab import Run
from labkit.layout import Layout, StepShape, ep_degrees, experts, kv_bytes_per_token, rank_memory, step_card
from labkit.load.schedule import make_schedule
from labkit.load.workload import load_workload
from labkit.measure.expert_totals import ExpertTotals, expert_totals
from labkit.teach.card import five_questions
from labkit.teach.expert_exercises import check_sent_bytes, check_spread, sent_bytes, spread
from labkit.teach.html import Table
from labkit.teach.reference import MIB, ReferenceCase

if TYPE_CHECKING:
    from labkit.teach.lesson import Lesson

__all__ = [
    "Answer",
    "answers_table",
    "ask",
    "attention_of",
    "check_sent_bytes",
    "check_spread",
    "crossings_table",
    "directions_table",
    "expert_bytes",
    "first_difference",
    "five_questions",
    "least_drops",
    "left_per_token",
    "per_token",
    "placement_table",
    "sent_bytes",
    "spread",
    "totals",
    "uniform_bytes",
    "who_has_what",
]


# ---- arithmetic: who has what


def attention_of(layout: Layout) -> str:
    """How the ranks that share out the experts do attention: the degree of ep tells."""
    if layout.ep == 1:
        return "by tp" if layout.tp > 1 else "each replica its own requests"
    if not layout.attention_dp:
        return "by tp, inside a replica"
    inside = f" by tp {layout.tp}" if layout.tp > 1 else ""
    return f"each replica its own requests{inside} (attention-DP)"


def who_has_what(case: ReferenceCase, *layouts: str) -> Table:
    """Bytes of a rank by kind, and how the experts came there."""
    rows = []
    for parsed in map(Layout.parse, layouts):
        memory = rank_memory(parsed, case.spec, 0, case.dtype_bytes)
        mine = experts(parsed, case.spec, 0)
        held = f"{len(mine)} whole" if parsed.ep > 1 or parsed.tp == 1 else f"{len(mine)}, 1/{parsed.tp} of each"
        others = sum(size for part, size in memory.items() if part not in ("experts", "attention"))
        rows.append(
            [str(parsed), held, _mib(memory["experts"]), attention_of(parsed), _mib(memory["attention"])]
            + [_mib(others), f"{kv_bytes_per_token(parsed, case.spec, 0, case.dtype_bytes):,} B"]
        )
    columns = ["layout", "experts of rank 0", "their bytes", "attention", "its bytes", "all else", "KV of a token"]
    return Table("What a rank holds", columns, rows, ["Predicted, from the shapes."])


def degrees_table(dp: int = 2, tp: int = 2) -> Table:
    """Every ep that dp × tp ranks can have, and what it means."""
    rows = []
    for ep in ep_degrees(dp=dp, pcp=1, tp=tp):
        layout = Layout(dp=dp, tp=tp, ep=ep)
        groups = ", ".join("–".join(map(str, group)) for group in layout.groups("ep") if len(group) > 1)
        kind = {1: "none: every replica has all experts, cut by tp", tp: "inside a replica", dp * tp: "over all ranks"}
        rows.append([str(ep), str(layout), kind[ep], groups or "–", attention_of(layout)])
    title = f"{dp} replicas of {tp} ranks: which degrees of ep there are"
    return Table(title, ["ep", "layout", "experts are shared out", "among ranks", "attention"], rows)


def uniform_bytes(case: ReferenceCase, layout: str) -> float:
    """What leaves ranks for a token's experts, both ways, if every expert is asked equally often."""
    parsed = Layout.parse(layout)
    cards = step_card(parsed, case.spec, StepShape(decode_seqs=parsed.tp), case.dtype_bytes)
    return float(next(card.wire_bytes for card in cards if card.axis == "ep"))


# ---- from runs: bytes


def totals(run: Run) -> ExpertTotals:
    return expert_totals(run.step_records)


def expert_bytes(run: Run) -> int:
    """Measured, of the fullest rank."""
    return max(rank["weights_by_part"]["experts"] for rank in run.summary["memory_bytes"])


def _left(run: Run) -> dict[tuple[str, str], tuple[float, float, float]]:
    """(axis, operation) → how often a rank calls it in a step, bytes it hands over in a step, and bytes that leave
    all ranks in the whole run: by ring algorithms, and counted row by row for experts.
    """
    rows, layout = run.collectives, Layout.parse(run.summary["layout"])
    found = {}
    for (axis, op), own in rows.groupby(["axis", "op"]) if len(rows) else ():
        steps, handed = own.groupby("rank")["step_id"].nunique().sum(), float(own["bytes"].sum())
        left = handed * _leaving(str(op), getattr(layout, axis))
        if op == "all_to_all":
            left = float(sum(totals(run).sent_bytes.values()))
        found[str(axis), str(op)] = (len(own) / steps, handed / steps, left)
    return found


def _leaving(op: str, degree: int) -> float:
    """Of the bytes that all ranks hand over, the part that crosses to another (Thakur et al. 2005)."""
    if op == "all_gather":
        return degree - 1
    return (2 if op == "all_reduce" else 1) * (degree - 1) / degree


def left_per_token(run: Run) -> float:
    """Bytes that leave ranks, all of them together, for each token that the run computed."""
    return sum(left for _, _, left in _left(run).values()) / totals(run).num_tokens


def crossings_table(runs: Mapping[str, Run]) -> Table:
    """What the door recorded, in a step and for a token."""
    rows = []
    for label, run in runs.items():
        tokens, left = totals(run).num_tokens, _left(run)
        for (axis, op), (times, handed, all_left) in left.items():
            per_token = f"{all_left / tokens / 1024:.2f} KiB"
            rows.append([label, axis, op, f"{times:.3g}", f"{handed / 1024:.1f} KiB", per_token])
        if not left:
            rows.append([label, "–", "nothing", "0", "0", "0"])
    columns = ["run", "axis", "operation", "times in a step", "a rank hands over in it", "leaves ranks, per token"]
    remark = "Counted by the recorder. Per step depends on how many requests shared a step; per token does not."
    return Table("What crosses", columns, rows, [remark])


# ---- from runs: who was asked


def directions_table(case: ReferenceCase, runs: Mapping[str, Run]) -> Table:
    """For replicas of one rank: rows that a rank's tokens asked for, rows it computed, and what it sent which way."""
    rows = []
    for label, run in runs.items():
        found = totals(run)
        for rank, computed in found.rows.items():
            asked = sum(sum(step.expert_tokens) for step in run.step_records if rank in step.ranks)
            stayed = _stayed(case, asked, computed, found.sent_bytes[rank])
            rows.append([label, f"{rank}", *(f"{n:,}" for n in (asked, computed, asked - stayed, computed - stayed))])
            rows[-1].append(f"{found.sent_bytes[rank] / MIB:.2f} MiB")
    columns = ["run", "rank", "rows its tokens ask for", "rows it computes", "tokens sent away", "outputs sent back"]
    return Table("Which way the rows went", [*columns, "bytes sent"], rows)


def _stayed(case: ReferenceCase, asked: int, computed: int, sent: int) -> int:
    """Rows that found their expert at home: what is left when the bytes both ways are taken off."""
    hidden = case.spec.hidden_size
    return round((asked * (hidden + 1) + computed * hidden - sent / case.dtype_bytes) / (2 * hidden + 1))


def per_token(run: Run) -> float:
    """Bytes that experts' ranks send each other, for each token."""
    return totals(run).sent_bytes_per_token


def placement_table(state: Mapping[str, Any]) -> Table:
    """What stands now, layer by layer: who has which experts, and how uneven that is under the traffic since."""
    found = state["experts"]
    rows = []
    for at, layer in enumerate(found["layers"]):
        held = [" ".join(map(str, mine)) for mine in found["placements"][at]]
        plain, placed = found["plain_imbalance"][at], found["imbalance"][at]
        rows.append([f"{layer}", *held, f"{plain:.2f}", f"{placed:.2f}"])
    num_ranks = len(found["placements"][0])
    columns = ["layer", *(f"experts of rank {rank}" for rank in range(num_ranks))]
    return Table("Placement by layer", [*columns, "busiest ÷ mean, plain", "busiest ÷ mean, as placed"], rows)


# ---- capacity


def least_drops(case: ReferenceCase, run: Run, factor: float) -> int:
    """Choices that a capacity must drop at least: each expert's, beyond what it takes in all steps together.

    For replicas of one rank, each of which takes `factor` times an even share of its own tokens, rounded up, in
    every layer.
    """
    moe = case.spec.moe
    assert moe is not None
    layers = sum(case.spec.is_moe_layer(layer) for layer in range(case.spec.num_layers))
    tokens = [step.prefill_tokens + step.num_decode_seqs for step in run.step_records if step.expert_tokens]
    room = layers * sum(math.ceil(factor * num * moe.top_k / moe.num_experts) for num in tokens)
    return sum(max(0, asked - room) for asked in totals(run).tokens)


@dataclass(frozen=True)
class Answer:
    """Token ids, and of the choices of experts that it took, how many were dropped."""

    ids: list[int]
    num_choices: int
    num_dropped: int


def ask(lesson: Lesson, workload: str, max_tokens: int = 16, index: int = 0) -> Answer:
    """The engine's greedy answer to a prompt of that workload, as the server stands now; asked alone."""
    state, moe = lesson.lab.state(), lesson.case.spec.moe
    assert moe is not None
    schedule = make_schedule(load_workload(workload), num_requests=index + 1, vocab_size=state["vocab_size"])
    prompt = schedule.requests[index].prompt_ids.tolist()
    steps: list[dict[str, Any]] = []
    began_ns = time.monotonic_ns()  # steps of before are told late

    def note(event: dict[str, Any]) -> None:
        steps.extend(step for step in event["steps"] if step["start_ns"] >= began_ns)

    with lesson.lab.client.events(note, ["steps"]):
        answer = lesson.lab.client.complete(
            prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True, return_token_ids=True
        )
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        computed = len(prompt) - cached + max_tokens - 1
        _await(lambda: sum(s["prefill_tokens"] + s["num_decode_seqs"] for s in steps) >= computed)
    choices = sum(sum(step["expert_tokens"]) for step in steps)
    return Answer(answer["choices"][0]["token_ids"], choices, sum(step["num_dropped"] for step in steps))


def _await(holds: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Steps are told in batches, a tenth of a second after they took place."""
    until = time.monotonic() + timeout_s
    while not holds() and time.monotonic() < until:
        time.sleep(0.02)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two answers have in common before they part."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def answers_table(answers: Mapping[str, Answer]) -> Table:
    """Side by side; what differs from the first is marked from there on."""
    first = next(iter(answers.values())).ids
    rows = []
    for label, answer in answers.items():
        ids, at = answer.ids, first_difference(first, answer.ids)
        words = [str(token) for token in ids[:at]] + (["│", *map(str, ids[at:])] if at < len(ids) else [])
        same = "" if ids is first else "all the same" if at == len(ids) else f"parts after {at}"
        rows.append([label, f"{answer.num_dropped:,} of {answer.num_choices:,}", " ".join(words), same])
    remark = "Token ids: the weights are random, so their text says nothing to a reader. │: from here on it differs."
    columns = ["", "choices dropped", "answer", "against the first"]
    return Table("The same prompt, alone, greedy", columns, rows, [remark])


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / MIB:.3g} MiB"
