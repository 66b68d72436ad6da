"""Advice where two pools serve now: they stay when they meet every wish, else the walk begins without a layout.

Settings and axes are changed from one pool; from two of them the way leads over the smallest that would do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from labkit.layout import Deployment
from labkit.layout.legality import require_legal
from labkit.plan.advise import Advice, commands_of
from labkit.plan.candidates import Candidate, all_candidates
from labkit.plan.case import Case
from labkit.plan.checks import all_checks
from labkit.plan.front import pareto_front
from labkit.plan.limits import limit_of
from labkit.plan.next_runs import next_runs
from labkit.plan.pools import pool_candidate
from labkit.plan.rank_places import place_ranks
from labkit.plan.verification import refused_by, verified
from labkit.plan.walk import YES, Question


def advise_with_pools(
    case: Case, current: Deployment, anew: Callable[[], Advice], *, verify: bool = True, asked: str = ""
) -> Advice:
    """`anew`: the advice as though nothing served. Raises ValueError where these pools cannot serve the model."""
    if [pool.role for pool in current.pools] != ["prefill", "decode"]:
        raise ValueError(f"{current}: a plan knows one pool, or prefill and decode, such as prefill:tp2,decode:tp2.")
    for pool in current.pools:
        require_legal(pool.layout, case.spec)
    if current.world_size > case.hardware.num_gpus:
        raise ValueError(f"{current} needs {current.world_size} GPUs, and {case.hardware.name} has "
                         f"{case.hardware.num_gpus}.")  # fmt: skip
    now = pool_candidate(case, current)
    if not now.fits:
        raise ValueError(f"{current} is said to serve now, and cannot by the arithmetic: {now.reason}")
    if verify and now.does:
        now = verified(case, now)
        if (refused := refused_by(now)) is not None:
            now = replace(now, fault=refused[0], reason=refused[1])
    serves = Question("now", "What serves now?", YES, f"{current}, on {current.world_size} GPUs"
                      f"{'.' if now.does else f': {now.reason}'}", {}, current.slug)  # fmt: skip
    if now.does:
        return _stays(case, now, serves, asked)
    found = anew()
    layouts = [*(one for one in found.layouts if one.layout != current), now]
    front = tuple(pareto_front([one for one in layouts if one.prediction], case.objective.percentile))
    return replace(found, walk=(serves, *found.walk), layouts=tuple(layouts), front=front)


def _stays(case: Case, now: Candidate, serves: Question, asked: str) -> Advice:
    places = place_ranks(now.layout, case.spec, case.hardware, case.demand.prompt_tokens, case.demand.tokens_each)
    checks = tuple(all_checks(case, now, places))
    everything = [*all_candidates(case), now]
    front = tuple(pareto_front([one for one in everything if one.prediction], case.objective.percentile))
    met = Question("pd", "Do these pools meet every wish?", YES, "; ".join(str(one) for one in now.outcomes) + ".", {},
                   now.layout.slug)  # fmt: skip
    return Advice(
        case, now, "as it is", (serves, met), checks, tuple(everything), front, limit_of(case, now), places,
        commands=tuple(commands_of(case, now, asked)), next=next_runs(case, now, checks, None),
    )  # fmt: skip
