"""What must be looked at before a layout is deployed, axis by axis, each with its figures: passed, failed, or not yet
measured (then with the run that would measure it).

A check compares the layout with the same one without the axis, by the same memory plan and the same cost of a step; a
wish that is met by less than the prediction's known error counts as not yet measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from labkit.layout import Deployment, Layout
from labkit.plan.candidates import Candidate
from labkit.plan.case import Case, cost_of_step, decode_work, prefill_work
from labkit.plan.choose import capacity
from labkit.plan.limits import communication
from labkit.plan.objective import Outcome, spoken_ms
from labkit.plan.rank_places import RankPlaces
from labkit.said import say, with_commas

PASSED, FAILED, NOT_MEASURED = "passed", "failed", "not yet measured"
MANY = 0.4
"""Of a step's time: what is above it would be worth more than any other change (as in `labkit.measure.binding`)."""
HALF_LOST = 0.5
"""Of the GPUs that an axis adds: below it, more than half of them do nothing for the step's time."""
UNEVEN = 1.1
"""Slowest stage over the mean: a tenth of the pipeline's pace."""


@dataclass(frozen=True)
class Check:
    axis: str
    name: str
    status: str
    sentence: str
    figures: dict[str, Any] = field(default_factory=dict)
    measure: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {"axis": self.axis, "name": self.name, "status": self.status, "sentence": self.sentence,
                "figures": self.figures, "measure": self.measure}  # fmt: skip


@dataclass(frozen=True)
class Look:
    """What a check looks at."""

    case: Case
    candidate: Candidate
    places: RankPlaces
    expert_load: tuple[float, ...] = ()
    """Tokens that each expert was asked for, as measured; empty: not measured."""

    @property
    def layout(self) -> Layout:
        return self.candidate.grid

    @property
    def in_flight(self) -> float:
        assert self.candidate.prediction is not None
        return self.case.demand.concurrency or self.candidate.prediction.concurrency

    @property
    def context(self) -> int:
        return self.case.demand.prompt_tokens + self.case.demand.output_tokens // 2

    @property
    def seqs(self) -> int:
        """Sequences of a decode step of one replica."""
        n = self.in_flight / self.layout.dp / self.layout.pp
        return max(1, round(n)) if math.isfinite(n) else self.candidate.settings.max_num_seqs

    def step_s(self, layout: Layout, *, prefill: bool) -> float:
        """Seconds of a decode step of what is in flight, or of a step full of a mean prompt."""
        cost = cost_of_step(self.case, layout, self.candidate.settings)
        return cost.seconds(self.prompt() if prefill else decode_work(self.seqs, self.context))

    def prompt(self) -> Any:
        budget = self.candidate.settings.max_num_batched_tokens
        return prefill_work(min(self.case.demand.prompt_tokens, budget))

    def parts(self, *, prefill: bool) -> dict[str, float]:
        cost = cost_of_step(self.case, self.layout, self.candidate.settings)
        return cost.parts(self.prompt() if prefill else decode_work(self.seqs, self.context))

    def link(self, axis: str) -> str:
        """That the axis's groups cross; empty where it has none."""
        return next((say(place.link) for place in self.places.axes if place.axis == axis), "")

    def measure(self) -> str:
        return say("labkit run --layout {layout} with this workload", layout=self.layout.slug)


def all_checks(
    case: Case, candidate: Candidate, places: RankPlaces, expert_load: Sequence[float] = ()
) -> list[Check]:
    """Of a layout that fits: what holds for every layout, then axis by axis."""
    from labkit.plan.checks_reuse import dcp_checks, ep_checks, pcp_checks
    from labkit.plan.pools import pool_checks

    look = Look(case, candidate, places, tuple(expert_load))
    found = list(_always(look))
    if isinstance(candidate.layout, Deployment):
        return found + list(pool_checks(case, candidate))
    of_axis: dict[str, Callable[[Look], Iterator[Check]]] = {
        "tp": _tp, "pp": _pp, "dp": _dp, "pcp": pcp_checks, "dcp": dcp_checks, "ep": ep_checks,
    }  # fmt: skip
    for axis, checks in of_axis.items():
        if getattr(look.layout, axis) > 1:
            found += checks(look)
    return found


# ---- of every layout


def _always(look: Look) -> Iterator[Check]:
    candidate, memory = look.candidate, look.candidate.memory
    assert memory is not None
    if memory.ranks:
        fullest = min(memory.ranks, key=lambda rank: rank.kv + rank.free)
        yield Check("all", say("memory"), PASSED if memory.fits else FAILED,
                    say("The fullest rank holds {weights} of weights, {kv} of KV.",
                        weights=_gb(sum(fullest.weights.values())), kv=_gb(fullest.kv)),
                    {"weights": sum(fullest.weights.values()), "kv": fullest.kv, "free": fullest.free})  # fmt: skip
    needed, most = look.in_flight, candidate.most_requests
    state = PASSED if needed <= most else FAILED if candidate.fault == "kv" else NOT_MEASURED
    yield Check("all", say("kv"), state,
                say("KV holds {most} requests of {tokens:,} tokens; {n:.0f} are in flight.", most=most,
                    tokens=look.case.demand.tokens_each, n=needed),
                {"most_requests": most, "in_flight": needed, "kv_tokens": memory.kv_tokens},
                say("{test}: preemptions and the queue", test=_load_test(look))
                if state == NOT_MEASURED else "")  # fmt: skip
    for outcome in candidate.outcomes:
        status = FAILED if not outcome.met else PASSED if outcome.sure else NOT_MEASURED
        yield Check("all", outcome.metric, status, _predicted(outcome), outcome.to_dict(),
                    "" if status != NOT_MEASURED else _load_test(look))  # fmt: skip
    if candidate.verified is not None:
        yield Check("all", say("simulated"), PASSED if candidate.verified["does"] else FAILED,
                    candidate.verified["sentence"], {name: candidate.verified[name] for name in
                    ("ttft_ms", "tpot_ms", "kv_peak", "preemptions", "requests")})  # fmt: skip
    problem = look.places.problem
    axes = with_commas(say("{axis} on {link}", axis=axis.axis, link=say(axis.link)) for axis in look.places.axes)
    where = say("{axes}.", axes=axes or say("one GPU: nothing crosses"))
    yield Check("all", say("placement"), FAILED if problem else PASSED, problem or where,
                {axis.axis: axis.link for axis in look.places.axes})  # fmt: skip


def _predicted(outcome: Outcome) -> str:
    if not outcome.band:
        return say("Predicted: {outcome}.", outcome=outcome.sentence)
    return say("Predicted: {outcome} (±{band:.0%}).", outcome=outcome.sentence, band=outcome.band)


def _load_test(look: Look) -> str:
    return say("the load test below, on {layout}", layout=look.candidate.layout)


# ---- tensor parallelism


def _tp(look: Look) -> Iterator[Check]:
    layout, memory = look.layout, look.candidate.memory
    assert memory is not None
    rank = memory.ranks[0] if memory.ranks else None
    if rank:
        weights = sum(rank.weights.values())
        yield Check("tp", say("fit"), PASSED,
                    say("Rank 0 holds {weights} of the weights, {replicated} of them on every rank alike.",
                        weights=_gb(weights), replicated=_gb(rank.replicated)),
                    {"weights": weights, "replicated": rank.replicated})  # fmt: skip
    half = _with_tp(layout)
    faster = {name: look.step_s(half, prefill=prefill) / look.step_s(layout, prefill=prefill)
              for name, prefill in (("decode", False), ("prefill", True))}  # fmt: skip
    shares = {name: communication(look.parts(prefill=prefill)) / look.step_s(layout, prefill=prefill)
              for name, prefill in (("decode", False), ("prefill", True))}  # fmt: skip
    lost = max(faster.values()) <= 1 or min(shares.values()) > MANY
    yield Check("tp", say("communication"), FAILED if lost else PASSED,
                say("On {link}, {decode:.0%} of a decode step and {prefill:.0%} of a prefill step is traffic; against "
                    "tp {tp} a decode step is {faster:.2f} times as fast, a prefill step {faster_prefill:.2f} times.",
                    link=look.link("tp"), **shares, tp=half.tp, faster=faster["decode"],
                    faster_prefill=faster["prefill"]), {"share": shares, "speedup": faster})  # fmt: skip
    used = {name: value / (layout.tp / half.tp) for name, value in faster.items()}
    yield Check("tp", say("work per rank"), PASSED if max(used.values()) >= HALF_LOST else FAILED,
                say("{heads} query heads and {columns} MLP columns a rank; of the GPUs that tp {tp} adds to tp {less}, "
                    "{decode:.0%} counts in decode and {prefill:.0%} in prefill.",
                    heads=look.case.spec.num_heads // layout.tp, columns=_columns(look), tp=layout.tp, less=half.tp,
                    **used), {"used": used})  # fmt: skip


def _with_tp(layout: Layout) -> Layout:
    """The same with half the degree (or none of it), without what depended on it."""
    tp = layout.tp // 2 if layout.tp % 2 == 0 else 1
    ep = 1 if layout.ep == 1 else tp * layout.pcp * (layout.dp if layout.attention_dp else 1)
    dcp = layout.dcp if layout.pcp > 1 and layout.dcp == layout.pcp else 1
    return replace(layout, tp=tp, dcp=dcp, ep=ep, sp=layout.sp and tp > 1)


def _columns(look: Look) -> int:
    moe = look.case.spec.moe
    if moe is None:
        return look.case.spec.intermediate_size // look.layout.tp
    return moe.intermediate_size // (look.layout.tp if look.layout.ep == 1 else 1)


# ---- pipeline parallelism


def _pp(look: Look) -> Iterator[Check]:
    layout, memory = look.layout, look.candidate.memory
    each = look.in_flight / layout.dp
    yield Check("pp", say("enough requests"), PASSED if each >= layout.pp else FAILED,
                say("{n:.1f} requests in flight for {pp} stages of a replica: with fewer than one each, stages stand "
                    "idle.", n=each, pp=layout.pp), {"in_flight": each, "stages": layout.pp})  # fmt: skip
    cost = cost_of_step(look.case, layout, look.candidate.settings)
    work = decode_work(look.seqs, look.context)
    uneven = cost.interval(work) * layout.pp / cost.seconds(work)
    told = say("The slowest stage takes {n:.2f} times the mean one.", n=uneven) if uneven <= UNEVEN else \
        say("The slowest stage takes {n:.2f} times the mean one; give it fewer layers (+split).", n=uneven)
    yield Check("pp", say("stage balance"), PASSED if uneven <= UNEVEN else FAILED, told,
                {"slowest_over_mean": uneven})  # fmt: skip
    size = layout.pp * look.candidate.settings.max_num_batched_tokens * look.case.spec.hidden_size * 2
    room = min((rank.kv + rank.free for rank in memory.ranks), default=0) if memory else 0
    yield Check("pp", say("activation buffers"), PASSED if size <= room else FAILED,
                say("{size} of hidden states for {pp} steps in flight; a rank has {room} beside its weights.",
                    size=_gb(size), pp=layout.pp, room=_gb(room)), {"bytes": size, "room": room})  # fmt: skip


# ---- data parallelism


def _dp(look: Look) -> Iterator[Check]:
    layout, demand = look.layout, look.case.demand
    memory = look.candidate.memory
    weights = sum(sum(rank.weights.values()) for rank in memory.ranks) if memory else 0
    held = say("{dp} replicas hold the weights {dp} times (experts once): {size} in all.", dp=layout.dp,
               size=_gb(weights)) if layout.attention_dp else \
        say("{dp} replicas hold the weights {dp} times: {size} in all.", dp=layout.dp, size=_gb(weights))  # fmt: skip
    yield Check("dp", say("memory"), PASSED, held, {"weights": weights, "replicas": layout.dp})
    each = look.in_flight / layout.dp
    if demand.shared_tokens and look.candidate.settings.enable_prefix_caching:
        yield Check("dp", say("routing"), NOT_MEASURED,
                    say("{n:,} tokens of a mean prompt are shared: which replica holds them decides, and how often it "
                        "is hit was not measured.", n=demand.shared_tokens), {"in_flight": each},
                    say("labkit run --set router=prefix beside router=least-work"))  # fmt: skip
    else:
        yield Check("dp", say("routing"), PASSED if each >= 1 else FAILED,
                    say("{n:.1f} requests in flight for each replica, prompts with nothing in common: any router that "
                        "counts tokens of work shares them out.", n=each), {"in_flight": each})  # fmt: skip
    most = capacity(look.case, look.candidate)
    rate = demand.rate or (look.candidate.prediction.requests_per_s if look.candidate.prediction else 0.0)
    used = rate / most if most else math.inf
    band = look.candidate.prediction.band_tpot if look.candidate.prediction else 0.0
    closed = demand.rate is None
    status = PASSED if closed or used * (1 + band) < 1 else NOT_MEASURED if used < 1 else FAILED
    yield Check("dp", say("admission"), status,
                say("{rate:.3g} requests/s are {used:.0%} of what {dp} replicas can do at most ({most:.3g}).",
                    rate=rate, used=used, dp=layout.dp, most=most), {"rate": rate, "capacity": most, "used": used},
                look.measure() if status == NOT_MEASURED else "")  # fmt: skip


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def spoken(seconds: float) -> str:
    return spoken_ms(1e3 * seconds)
