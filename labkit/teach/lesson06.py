"""Lesson 06: combinations. Which axis goes where is decided by what crosses, how often, and over which path.

The exercise is the bytes that cross between nodes for one decoded token, from groups and a map of nodes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from labkit.lab import Run
from labkit.layout import Layout
from labkit.load.lengths import Lengths
from labkit.load.workload import Part, Workload
from labkit.measure.crossings import crossings
from labkit.model.spec import DTYPE_BYTES, load_spec
from labkit.teach.across import bytes_across, node_map
from labkit.teach.apart import CHATS_AND_LONG, apart_table, handoff_table, shared_share, token_ms
from labkit.teach.beside import two_halves
from labkit.teach.card import five_questions
from labkit.teach.checks import Check, Problem, show_check
from labkit.teach.html import Table
from labkit.teach.lesson import Lesson
from labkit.teach.own_server import OwnServer
from labkit.teach.reference import MIB, ReferenceCase

__all__ = [
    "CHATS_AND_LONG",
    "FEW_TOKENS",
    "apart_table",
    "bytes_per_token",
    "check_link_bytes",
    "five_questions",
    "handoff_table",
    "jobs_table",
    "link_bytes",
    "link_table",
    "measure",
    "per_step",
    "predicted_across",
    "shared_share",
    "sums_across",
    "token_ms",
    "two_halves",
]

RANKS_PER_NODE = 4
FEW_TOKENS = Workload(
    name="few-tokens",
    title="One prompt of 128 tokens, an answer of 5",
    parts=(Part(Lengths("constant", tokens=128), Lengths("constant", tokens=5)),),
)
"""One prefill step and four decode steps a request: enough to count what crosses."""


class Measured(NamedTuple):
    """A run, and what the server said of the layout that it ran on."""

    run: Run
    kv_tokens: int
    """All replicas together."""
    nodes: tuple[int, ...]
    """Of each rank."""
    link_bytes: int | None
    """Sent over the nodes' links during the run; None without links."""

    @property
    def layout(self) -> Layout:
        return Layout.parse(self.run.summary["layout"])

    @property
    def num_tokens(self) -> int:
        """Prompt tokens computed and tokens decoded."""
        return sum(step.prefill_tokens + step.num_decode_seqs for step in self.run.step_records)

    @property
    def weights(self) -> int:
        """Of the fullest rank, in bytes."""
        return max(rank["weights"] for rank in self.run.summary["memory_bytes"])


def measure(lesson: Lesson, server: OwnServer | None, layout: str, **load: Any) -> Measured:
    """Switch first and run afterwards, so that the link's counter sees the run alone. `load`: as `Lesson.run`.

    server: whose links are counted; None where the lesson is at somebody else's server.
    """
    settings = {"memory_per_rank": 2 * lesson.case.budget_bytes}
    lesson.switch(layout, probe=False, **settings)
    state, before = lesson.lab.state(), server.link_bytes() if server else None
    given: dict[str, Any] = {"workload": FEW_TOKENS, "concurrency": 1, "num_requests": lesson.size(2, 8)}
    run = lesson.run(layout, settings=settings, **(given | load))
    after = server.link_bytes() if server else None
    return Measured(
        run,
        sum(replica["kv_total_blocks"] * replica["kv_block_tokens"] for replica in state["replicas"]),
        tuple(node_map(state, RANKS_PER_NODE)),
        None if before is None or after is None else after - before,
    )


def per_step(each: Measured, phase: str) -> dict[str, float]:
    """Axis → crossings in a step of that phase, all groups together."""
    found = crossings(each.run.collectives, each.run.step_records)
    return {one.axis: one.per_step for one in found if one.phase == phase}


def bytes_per_token(each: Measured, phase: str) -> dict[str, float]:
    """Axis → bytes of its crossings for a token of that phase, of one rank of each group."""
    found = crossings(each.run.collectives, each.run.step_records)
    return {one.axis: one.num_bytes / one.num_tokens for one in found if one.phase == phase}


# ---- each axis, and the figure that verifies it


def jobs_table(runs: dict[str, Measured]) -> Table:
    """The five axes in the order in which one decides, each with its job and the measured figure that verifies it.

    runs: tp1, tp2, pp2, dp2, pcp2xdcp2 and tp2xep2, by slug.
    """
    whole, tp, pp, dp, cp, ep = (runs[slug] for slug in ("tp1", "tp2", "pp2", "dp2", "pcp2xdcp2", "tp2xep2"))
    experts = [_mib(_part(each, "experts")) for each in (whole, ep)]
    busiest = [f"{_busiest_replica(each)} of {len(each.run.records)}" for each in (whole, dp)]
    rows = [
        ["TP", "one layer's work, shared", "weights that a rank reads", _mib(whole.weights), _mib(tp.weights)],
        ["PP", "whole layers, a slower path", "weights of the fullest rank", _mib(whole.weights), _mib(pp.weights)],
        ["DP", "more requests at once", "requests of the busiest replica", *busiest],
        ["CP, prefill", "a long prompt's positions", "its query–key pairs, on the busiest rank", "100%", _pairs(cp)],
        ["CP, decode", "the KV of long contexts", "KV tokens that fit", f"{whole.kv_tokens:,}", f"{cp.kv_tokens:,}"],
        ["EP", "whole experts, shared out", "expert weights of a rank", *experts],
    ]
    axes = [(tp, "tp", "decode"), (pp, "pp", "decode"), (dp, "dp", "decode"), (cp, "pcp", "prefill")]
    axes += [(cp, "dcp", "decode"), (ep, "ep", "decode")]
    crossing = [_crossing(each, axis, phase) for each, axis, phase in axes]
    columns = ["axis", "its job", "the figure that verifies it", "without", "at degree 2", "crosses, a step"]
    remark = "All of it measured here, one run a layout. A step of prefill for CP in prefill, else a step of decode."
    return Table("In this order: TP → PP → DP → CP → EP", columns, _joined(rows, crossing), [remark])


def _joined(rows: list[list[str]], last: list[str]) -> list[list[str]]:
    return [[*row, value] for row, value in zip(rows, last, strict=True)]


def _part(each: Measured, part: str) -> float:
    return max(rank["weights_by_part"].get(part, 0) for rank in each.run.summary["memory_bytes"])


def _busiest_replica(each: Measured) -> int:
    served = [record.server.replica for record in each.run.records if record.server]
    return max(served.count(replica) for replica in set(served))


def _pairs(each: Measured) -> str:
    """Of all pairs that the prompts' queries saw, the share of the rank that computed most."""
    by_rank = [sum(keys) for keys in zip(*(s.query_keys for s in each.run.step_records if s.query_keys), strict=True)]
    return f"{max(by_rank) / sum(by_rank):.1%}"


def _crossing(each: Measured, axis: str, phase: str) -> str:
    count = per_step(each, phase).get(axis)
    for found in crossings(each.run.collectives, each.run.step_records):
        if (found.axis, found.phase) == (axis, phase):
            return f"{count:.3g} × {found.bytes_each:,.0f} B"
    return "nothing"


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / MIB:.1f} MiB"


# ---- across the nodes


def sums_across(each: Measured) -> float:
    """Bytes that crossed between nodes for a token: the sums and messages of tp and pp, without the logits."""
    found = bytes_across(each.run.collectives, each.layout, each.nodes)
    return sum(value for (_, _, op), value in found.items() if op in ("all_reduce", "send")) / each.num_tokens


def predicted_across(each: Measured, case: ReferenceCase) -> float:
    """The exercise's answer for a layout as it stands here."""
    row = case.spec.hidden_size * case.dtype_bytes
    return link_bytes(stages_of(each.layout), each.nodes, case.spec.num_layers, row)


def link_table(runs: dict[str, Measured]) -> Table:
    """What each layout keeps on a rank, and what it sends from node to node, recorded and as the link counted it."""
    rows = []
    for label, each in runs.items():
        found = bytes_across(each.run.collectives, each.layout, each.nodes)
        by_axis = {axis: 0.0 for axis, _, _ in found}
        for (axis, _, _), value in found.items():
            by_axis[axis] += value / each.num_tokens
        parts = ", ".join(f"{axis.upper()} {value:,.0f} B" for axis, value in by_axis.items() if value)
        counted = "no link here" if each.link_bytes is None else f"{each.link_bytes / each.num_tokens:,.0f} B"
        rows.append(
            [label, _mib(each.weights), f"{each.kv_tokens:,}", f"{sum(by_axis.values()):,.0f} B", parts or "none"]
            + [counted, f"{each.run.summary['tpot_ms']['p50']:.0f} ms"]
        )
    columns = ["layout", "weights of a rank", "KV tokens, all replicas", "across nodes, a token", "of which"]
    columns += ["the link counted", "TPOT p50"]
    remarks = [
        "Across nodes: recorded bytes of each group whose ranks stand on two nodes; collectives as rings. The link's "
        "own counter has packet headers, acknowledgements and the nodes' own talk in it.",
        *_oversubscribed(next(iter(runs.values()))),
    ]
    return Table("Two nodes of four ranks", columns, rows, remarks)


def _oversubscribed(each: Measured) -> list[str]:
    where = each.run.environment
    if where["num_ranks"] * where["threads_per_rank"] <= where["num_cores"]:
        return []
    return [
        f"⚠ {where['num_ranks']} ranks took turns on {where['num_cores']} cores: TPOT says nothing here about a "
        "machine that has the cores. Bytes are right all the same."
    ]


# ---- the exercise


def link_bytes(stages: Sequence[Sequence[int]], node_of: Sequence[int], num_layers: int, row_bytes: int) -> float:
    """The solution: bytes between nodes for one decoded token of one replica.

    stages: the tp group of each pipeline stage, ranks in the order of the ring; node_of: the node of each rank.
    """
    total = 0.0
    for stage, ranks in enumerate(stages):
        n = len(ranks)
        edges = sum(node_of[rank] != node_of[ranks[(i + 1) % n]] for i, rank in enumerate(ranks))
        sums = 2 * num_layers // len(stages) + (stage == 0)
        total += sums * edges * 2 * (n - 1) / n * row_bytes
    for here, there in zip(stages, stages[1:], strict=False):
        total += row_bytes * sum(node_of[a] != node_of[b] for a, b in zip(here, there, strict=True))
    return total


def stages_of(layout: Layout) -> list[list[int]]:
    """The tp groups of the first replica, stage after stage."""
    first = set(layout.replica_ranks(0))
    return [list(group) for group in layout.groups("tp") if first.issuperset(group)]


_HALVES, _TURNS = [0] * 4 + [1] * 4, [0, 1] * 4


def check_link_bytes(function: Callable[..., Any]) -> Check:
    """Layouts of the lab's model on two nodes of four, a map that deals ranks out in turn, and a model of today."""
    cases = (
        ("lab-moe-8x", "pp2xtp4", _HALVES, "TP inside nodes, PP between: four messages of a row"),
        ("lab-moe-8x", "dp2xtp4", _HALVES, "a replica a node: nothing crosses"),
        ("lab-moe-8x", "tp8", _HALVES, "every sum goes across, twice round the ring"),
        ("lab-moe-8x", "pp4xtp2", _HALVES, "only the middle one of three boundaries lies between the nodes"),
        ("lab-moe-8x", "pp2xtp4", _TURNS, "the same layout, ranks dealt out in turn: every edge of each ring crosses"),
        ("lab-moe-8x", "dp4xtp2", _HALVES, "pairs inside nodes"),
        ("llama-3.1-70b", "pp2xtp8", [0] * 8 + [1] * 8, "80 layers, rows of 16 KiB"),
    )
    return show_check(function, [_case(*case) for case in cases])


def _case(model: str, slug: str, node_of: list[int], why: str) -> Problem:
    spec, layout = load_spec(model), Layout.parse(slug)
    row = spec.hidden_size * (DTYPE_BYTES["bfloat16"] if spec.num_layers > 8 else DTYPE_BYTES["float32"])
    stages, where = stages_of(layout), "in halves" if node_of[0] == node_of[1] else "in turn"
    shown = f"{model} as {layout}, nodes {where}"
    args = (stages, node_of, spec.num_layers, row)
    return Problem(args, link_bytes(*args), why, shown)
