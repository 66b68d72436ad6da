"""The checks of the axes that share out positions and experts: PCP's crossover, DCP's resident tokens and TPOT, EP's
placement, traffic and imbalance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from labkit.layout import Layout, imbalance, plain_placement
from labkit.plan.case import cost_of_step, decode_work, prefill_work
from labkit.plan.checks import FAILED, MANY, NOT_MEASURED, PASSED, Check, Look, spoken
from labkit.plan.choose import without_pcp
from labkit.plan.cost import step_cost
from labkit.plan.memory import memory_on
from labkit.said import say

LONGEST = 1 << 20
"""Tokens up to which a crossover is looked for."""
MOST_SKEW = 16.0


# ---- PCP


def pcp_checks(look: Look) -> Iterator[Check]:
    layout, demand = look.layout, look.case.demand
    bare = without_pcp(layout)
    at = crossover(look, layout, bare)
    prompt = demand.long_prompt_tokens
    if at is None:
        told = say("At no prompt up to {most:,} tokens is {layout} faster than {bare}.", most=LONGEST, layout=layout,
                   bare=bare)  # fmt: skip
        yield Check("pcp", say("crossover"), FAILED, told)
        return
    ours, theirs = (_prefill_s(look, one, prompt) for one in (layout, bare))
    yield Check("pcp", say("crossover"), PASSED if prompt >= at else FAILED,
                say("From {at:,} tokens on a prompt is computed faster than without; the p95 prompt has {tokens:,} and "
                    "takes {time} instead of {without}.", at=at, tokens=prompt, time=spoken(ours),
                    without=spoken(theirs)),
                {"crossover_tokens": at, "prompt_tokens": prompt, "with_s": ours, "without_s": theirs})  # fmt: skip


def crossover(look: Look, layout: Layout, bare: Layout) -> int | None:
    """The shortest prompt (to a power of two, then a sixteenth of it) that `layout` computes faster than `bare`."""
    doubled = 16
    while doubled <= LONGEST and _prefill_s(look, layout, doubled) >= _prefill_s(look, bare, doubled):
        doubled *= 2
    if doubled > LONGEST:
        return None
    steps = range(doubled // 2, doubled, max(1, doubled // 32))
    return next((n for n in steps if _prefill_s(look, layout, n) < _prefill_s(look, bare, n)), doubled)


def _prefill_s(look: Look, layout: Layout, tokens: int) -> float:
    return cost_of_step(look.case, layout, look.candidate.settings).seconds(prefill_work(tokens))


# ---- DCP


def dcp_checks(look: Look) -> Iterator[Check]:
    layout, case = look.layout, look.case
    bare = replace(layout, dcp=1)
    settings, memory = look.candidate.settings, look.candidate.memory
    assert memory is not None
    held = memory_on(bare, case.spec, case.hardware, settings)
    needed = look.in_flight * case.demand.tokens_each
    yield Check("dcp", say("resident tokens"), PASSED if memory.kv_tokens >= needed else FAILED,
                say("KV for {tokens:,} tokens instead of {without:,}; {needed:,.0f} are resident at this load.",
                    tokens=memory.kv_tokens, without=held.kv_tokens, needed=needed),
                {"with": memory.kv_tokens, "without": held.kv_tokens, "needed": needed})  # fmt: skip
    ours, theirs = look.step_s(layout, prefill=False), look.step_s(bare, prefill=False)
    met = look.candidate.outcome("tpot") or look.candidate.outcome("answer_tokens")
    status = FAILED if met is not None and not met.met else PASSED
    yield Check("dcp", say("TPOT"), status,
                say("A decode step of {n} answers takes {time} instead of {without}: fewer keys to read, one more "
                    "merge a layer.", n=look.seqs, time=spoken(ours), without=spoken(theirs)),
                {"with_s": ours, "without_s": theirs})  # fmt: skip


# ---- EP


def ep_checks(look: Look) -> Iterator[Check]:
    layout, spec = look.layout, look.case.spec
    assert spec.moe is not None
    memory = look.candidate.memory
    experts = sum(rank.weights.get("experts", 0) for rank in memory.ranks) / len(memory.ranks) if memory else 0
    yield Check("ep", say("placement"), PASSED,
                say("{n} experts over {ep} ranks: {each:g} each, {size:.1f} GB of a rank's weights.",
                    n=spec.moe.num_experts, ep=layout.ep, each=spec.moe.num_experts / layout.ep, size=experts / 1e9),
                {"experts_per_rank": spec.moe.num_experts / layout.ep, "bytes": experts})  # fmt: skip
    shares = {}
    for name, prefill in (("decode", False), ("prefill", True)):
        parts = look.parts(prefill=prefill)
        shares[name] = parts.get("ep", 0.0) / sum(parts.values())
    yield Check("ep", say("traffic"), PASSED if max(shares.values()) <= MANY else FAILED,
                say("On {link}, tokens to experts and back are {decode:.0%} of a decode step and {prefill:.0%} of a "
                    "prefill step.", link=look.link("ep"), **shares), {"share": shares})  # fmt: skip
    yield _imbalance(look)


def _imbalance(look: Look) -> Check:
    layout, spec = look.layout, look.case.spec
    assert spec.moe is not None
    limit_s = _tpot_limit_s(look)
    most = _tolerated(look, limit_s) if limit_s else None
    if not look.expert_load:
        told = say("How unevenly the experts are asked was not measured: an even load is assumed")
        return Check("ep", say("imbalance"), NOT_MEASURED, _with_allowed(told, most), {"tolerated": most},
                     say("labkit run with an ep layout: its steps tell the tokens of each expert"))  # fmt: skip
    if len(look.expert_load) != spec.moe.num_experts:
        raise ValueError(f"{len(look.expert_load)} expert loads for a model with {spec.moe.num_experts} experts.")
    found = imbalance(plain_placement(spec.moe.num_experts, layout.ep), look.expert_load)
    slower = _step_s(look, found) / _step_s(look, 1.0)
    ok = most is None or found <= most
    told = say("The busiest rank's load is {found:.2f} times the mean one's as measured: a decode step takes "
               "{slower:.2f} times as long", found=found, slower=slower)  # fmt: skip
    return Check("ep", say("imbalance"), PASSED if ok else FAILED, _with_allowed(told, most),
                 {"imbalance": found, "slower": slower, "tolerated": most})  # fmt: skip


def _with_allowed(told: str, most: float | None) -> str:
    if not most:
        return say("{told}.", told=told)
    return say("{told}; the TPOT asked for allows {most:.2f}.", told=told, most=most)


def _tpot_limit_s(look: Look) -> float | None:
    outcome = look.candidate.outcome("tpot")
    return outcome.limit / 1e3 if outcome else None


def _step_s(look: Look, skew: float) -> float:
    cost = step_cost(look.layout, look.case.spec, look.case.hardware, look.candidate.settings, look.case.engine, skew)
    return cost.seconds(decode_work(look.seqs, look.context))


def _tolerated(look: Look, limit_s: float) -> float:
    """The largest skew at which a decode step alone keeps to the limit."""
    low, high = 1.0, MOST_SKEW
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if _step_s(look, middle) <= limit_s else (low, middle)
    return low
