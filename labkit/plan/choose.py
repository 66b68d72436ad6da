"""Which of the layouts that do is the smallest: fewest GPUs, and no axis that could be lowered without losing a wish.

Of several with as many GPUs, those that change the fewest axes of what it starts from; of these the one that is best at
what the limit is about (capacity for a queue, TTFT for long prompts, TPOT for one answer, resident requests for KV);
where that is the same within a few percent, fewer axes. Rules of placement come first: tensor parallelism stays inside
the fast group where a layout that does so meets the wishes, and pipeline stages are for a boundary that something must
cross.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from labkit.layout import AXES, Layout
from labkit.layout.choices import simplicity
from labkit.plan.candidates import Candidate, degrees, within
from labkit.plan.case import Case, cost_of_step, decode_work, prefill_work
from labkit.plan.findings import BANDWIDTH, COMMUNICATION, COMPUTE, KV, QUEUE
from labkit.plan.limits import INTERFERENCE, Limit
from labkit.plan.rank_places import often_on_slow

SAME = 0.03
"""Relative: nearer than the cost model can tell apart two layouts of one model on one device."""


def smallest(case: Case, candidates: Sequence[Candidate], limit: Limit, base: Candidate) -> Candidate | None:
    """The one to take; None where none does. The base's GPUs are counted as there: what it starts from needs them."""
    doing = [one for one in candidates if one.does and pcp_has_its_job(candidates, one)]
    kept = allowed(case, minimal(doing))
    if not kept:
        return None
    kept = [one for one in kept if like_those_measured(one.grid)] or kept
    fewest = min(max(one.num_gpus, base.num_gpus) for one in kept)
    alike = [one for one in kept if max(one.num_gpus, base.num_gpus) == fewest]
    least = min(changed_axes(base, one) for one in alike)
    return _best(case, [one for one in alike if changed_axes(base, one) == least], limit)


def like_those_measured(layout: Layout) -> bool:
    """Whether its collectives are among as many ranks as the cost model was fitted on (1, 2, 4, 8 …): a group of three
    or seven is an extrapolation that a choice should not rest on. Replicas and stages have no such groups."""
    return all(degree & (degree - 1) == 0 for degree in (layout.tp, layout.pcp, layout.dcp, layout.ep))


PCP_JOBS = ("ttft", "overload", "kv", "server_tokens")


def pcp_has_its_job(candidates: Sequence[Candidate], one: Candidate) -> bool:
    """Prefill context parallelism is for prompts: without it the same layout holds the model, and misses something that
    prompts decide. (Its ranks would share out experts as well, which is expert parallelism's job.)"""
    if one.grid.pcp == 1:
        return True
    bare = without_pcp(one.grid)
    less = next((other for other in candidates if other.layout == bare), None)
    return less is not None and less.fits and less.fault in PCP_JOBS


def without_pcp(layout: Layout) -> Layout:
    ep = 1 if layout.ep == 1 else layout.tp * (layout.dp if layout.attention_dp else 1)
    return replace(layout, pcp=1, dcp=1, ep=ep, ring=False)


def changed_axes(base: Candidate, other: Candidate) -> int:
    """How many axes differ: what has to be set up anew."""
    return sum(one != two for one, two in zip(degrees(base.grid), degrees(other.grid), strict=True))


def minimal(doing: Sequence[Candidate]) -> list[Candidate]:
    """Those of which no other that does is smaller on one axis and nowhere larger: every axis of theirs has a job."""
    return [one for one in doing if not any(within(other.grid, one.grid) for other in doing)]


def allowed(case: Case, doing: list[Candidate]) -> list[Candidate]:
    """Without stages where tensor parallelism inside the fast group does it, without collectives of every layer on a
    slow link where a layout of no more GPUs keeps them off it.
    """
    near = {one.grid for one in doing if not often_on_slow(one.grid, case.spec, case.hardware)}
    plain = any(one.grid in near and one.grid.pp == 1 for one in doing)
    kept = [one for one in doing if one.grid.pp == 1 or not plain]
    fewest = min((one.num_gpus for one in kept if one.grid in near), default=math.inf)
    return [one for one in kept if one.grid in near or one.num_gpus < fewest]


def _best(case: Case, alike: list[Candidate], limit: Limit) -> Candidate:
    figures = {one.grid: merit(case, one, limit) for one in alike}
    best = min(figures.values())
    near = [one for one in alike if figures[one.grid] <= best + SAME * abs(best)]
    return min(near, key=lambda one: simplicity(one.grid))


def merit(case: Case, candidate: Candidate, limit: Limit) -> float:
    """The figure that the limit is about, to be made small."""
    q, found = case.objective.percentile, candidate.prediction
    assert found is not None
    if limit.resource == KV:
        return -float(candidate.most_requests)
    if limit.resource == QUEUE:
        return -capacity(case, candidate)
    if limit.resource == COMPUTE and limit.cause != INTERFERENCE:
        return found.ttft_ms[q]
    if limit.resource in (BANDWIDTH, COMMUNICATION) or limit.cause == INTERFERENCE:
        return found.tpot_ms[q]
    return 0.0


def capacity(case: Case, candidate: Candidate) -> float:
    """Requests a second that the layout can do at most: as many in flight as KV and max_num_seqs allow, each bringing
    one prefill and its decode steps. A bound of arithmetic to compare layouts by, without a queue."""
    layout, demand = candidate.grid, case.demand
    seqs = min(candidate.most_requests // layout.dp, candidate.settings.max_num_seqs * layout.pp)
    if seqs < 1:
        return 0.0
    cost, context = cost_of_step(case, layout, candidate.settings), demand.prompt_tokens + demand.output_tokens // 2
    each = max(1, seqs // layout.pp)
    step_s = cost.interval(decode_work(each, context))
    budget = min(candidate.settings.max_num_batched_tokens, demand.prompt_tokens)
    prompt_s = cost.interval(prefill_work(budget)) * demand.prompt_tokens / budget
    return layout.dp / (demand.output_tokens * step_s / each + prompt_s)


def lowered(candidates: Sequence[Candidate], layout: Layout, axis: str) -> Candidate | None:
    """The nearest layout with a lower degree on one axis and no more on the others: what the axis is compared with."""
    found = [
        one for one in candidates
        if one.legal and within(one.grid, layout) and _degree(one.grid, axis) < _degree(layout, axis)
    ]  # fmt: skip
    return max(found, key=lambda one: (_kept(one.grid, layout, axis), getattr(one.grid, axis)), default=None)


def _degree(layout: Layout, axis: str) -> int:
    return int(getattr(layout, axis))


def _kept(small: Layout, large: Layout, axis: str) -> float:
    """How much of the other axes is kept, in doublings."""
    others = [other for other in AXES if other != axis]
    return -sum(math.log2(getattr(large, other) / getattr(small, other)) for other in others)


def nearest_miss(candidates: Sequence[Candidate]) -> Candidate | None:
    """Where none does: the one whose worst wish is missed least."""
    tried = [one for one in candidates if one.outcomes]
    return min(tried, key=lambda one: (one.fault == "overload", _ratio(one), simplicity(one.grid)), default=None)


def _ratio(candidate: Candidate) -> float:
    return max(outcome.ratio for outcome in candidate.outcomes)
