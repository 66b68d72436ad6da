"""What may help before any axis does: the engine's limits, the prefix cache, shorter input, fewer at once, more of the
same server. Each is tried on a layout that fits and misses a wish, and answers with its figure.

What the engine can be set to, the advice may choose. What changes the traffic or the numbers (shorter prompts, KV in
fp8) is told with its figure and left to whoever owns them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from labkit.layout import Layout
from labkit.plan.candidates import Candidate, evaluate
from labkit.plan.case import Case
from labkit.plan.findings import BANDWIDTH, COMPUTE, KV, QUEUE
from labkit.plan.limits import Limit
from labkit.plan.work import EngineSettings
from labkit.said import say, with_commas

STEP_BUDGETS = (512, 1024, 2048, 4096, 16384, 32768)
MAX_SEQS = 1024
MOST_REPLICAS = 64
HALVINGS = 12
FULLER = 0.95
"""gpu_memory_utilization: what is usually left to try; the rest is for what the engine does not count."""
SPARE = 0.05
"""Of every limit: a setting that meets them by less is not taken instead of an axis."""


@dataclass(frozen=True)
class Remedy:
    """`by`: who can do it: engine (a setting), application (what is sent), quality (the numbers change), hardware."""

    code: str
    by: str
    does: bool
    sentence: str
    figures: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the engine, changed by it."""
    candidate: Candidate | None = None
    """The layout so set."""

    def to_dict(self) -> dict[str, Any]:
        return {"code": self.code, "by": self.by, "does": self.does, "sentence": self.sentence,
                "figures": self.figures, "settings": self.settings}  # fmt: skip


def engine_remedies(case: Case, base: Candidate, limit: Limit) -> list[Remedy]:
    """Settings that speak to the limit, each tried alone; those that do it first."""
    tried = [_set(case, base, code, changes, why) for code, changes, why in _changes(case, base, limit)]
    return sorted(tried, key=lambda remedy: not remedy.does)


def other_remedies(case: Case, base: Candidate, limit: Limit) -> list[Remedy]:
    """What the application, the numbers' owner, or a purse could do about it."""
    found = [_shorter(case, base, limit), _shared(case, base, limit), _admission(case, base)]
    found += [_kv_in_bytes(case, base)] if limit.resource == KV else []
    return [remedy for remedy in (*found, _same_again(case, base, limit)) if remedy is not None]


def _changes(case: Case, base: Candidate, limit: Limit) -> Iterator[tuple[str, dict[str, Any], str]]:
    now, q = base.settings, case.objective
    if case.demand.shared_tokens and not now.enable_prefix_caching and limit.resource in (QUEUE, COMPUTE):
        yield "prefix cache", {"enable_prefix_caching": True}, say(
            "{shared:,} of a mean prompt's {tokens:,} tokens are shared", shared=case.demand.shared_tokens,
            tokens=case.demand.prompt_tokens,
        )  # fmt: skip
    if limit.cause == "max_num_seqs":
        for seqs in (2 * now.max_num_seqs, 4 * now.max_num_seqs):
            if seqs <= min(MAX_SEQS, now.max_num_batched_tokens):
                yield "max_num_seqs", {"max_num_seqs": seqs}, say("steps are full while KV has room")
    if limit.resource in (COMPUTE, QUEUE, BANDWIDTH) and limit.load != "low" or limit.cause == "prefill":
        for budget in STEP_BUDGETS:
            smaller = budget < now.max_num_batched_tokens
            wants_smaller = limit.resource != QUEUE and q.tpot_ms is not None and limit.cause != "prefill"
            if budget >= now.max_num_seqs and budget != now.max_num_batched_tokens and smaller == wants_smaller:
                yield "max_num_batched_tokens", {"max_num_batched_tokens": budget}, (
                    say("less of a prompt in one step") if smaller else say("more of a prompt in one step")
                )
    if limit.resource == KV and now.gpu_memory_utilization < FULLER:
        yield "gpu_memory_utilization", {"gpu_memory_utilization": FULLER}, say("more of the memory for KV")


def _set(case: Case, base: Candidate, code: str, changes: dict[str, Any], why: str) -> Remedy:
    found = evaluate(case, base.grid, replace(base.settings, **changes))
    setting = with_commas(f"{name} {value}" for name, value in changes.items())
    spare = found.does and all(outcome.ratio <= 1 - SPARE for outcome in found.outcomes)
    if spare:
        told = say("{setting} ({why}) meets every wish", setting=setting, why=why)
    elif found.does:
        told = say("{setting} ({why}) meets every wish by less than {spare:.0%}", setting=setting, why=why, spare=SPARE)
    else:
        told = say("{setting} ({why}) is not enough: {reason}", setting=setting, why=why, reason=found.reason)
    return Remedy(code, "engine", spare, told, _figures(case, found), changes, found)


def _figures(case: Case, found: Candidate) -> dict[str, Any]:
    q = case.objective.percentile
    figures: dict[str, Any] = {"most_requests": found.most_requests}
    for metric in ("ttft", "tpot"):
        value = found.figure(metric, q)
        figures[f"{metric}_{q}_ms"] = value if value < float("inf") else None
    return figures


# ---- what is not the engine's


def _largest(does: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number up to `high` that still does, to a part in 2**HALVINGS; `low` where none is known."""
    for _ in range(HALVINGS):
        if high - low <= max(1, high // 200):
            break
        middle = (low + high) // 2
        low, high = (middle, high) if does(middle) else (low, middle)
    return low


def _shorter(case: Case, base: Candidate, limit: Limit) -> Remedy | None:
    now = case.demand.prompt_tokens
    if limit.resource not in (QUEUE, COMPUTE, KV) or now < 2:
        return None
    fits = _largest(lambda n: evaluate(_with_prompt(case, n), base.grid, base.settings).does, 0, now)
    if not fits:
        told = say("No prompt is short enough for it.")
        return Remedy("shorter input", "application", False, told, {"prompt_tokens": 0})
    sentence = say("Prompts of {fits:,} tokens on average instead of {now:,} would meet every wish on {layout}",
                   fits=fits, now=now, layout=base.layout)  # fmt: skip
    return Remedy("shorter input", "application", True, sentence, {"prompt_tokens": fits, "now": now})


def _with_prompt(case: Case, tokens: int) -> Case:
    return replace(case, demand=case.demand.with_prompt(tokens))


def _shared(case: Case, base: Candidate, limit: Limit) -> Remedy | None:
    """KV of a shared prefix is held once too, but the answer's own is not: only queue and prefill are promised."""
    now, known = case.demand.prompt_tokens, case.demand.shared_tokens
    if limit.resource not in (QUEUE, COMPUTE) or not base.settings.enable_prefix_caching or now < 2:
        return None

    def does(missing: int) -> bool:
        shared = replace(case, demand=replace(case.demand, shared_tokens=now - missing))
        return evaluate(shared, base.grid, base.settings).does

    least = now - _largest(does, 0, now - known)
    if least >= now:
        return None
    sentence = say("With {share:.0%} of a prompt found in the prefix cache (now {now:.0%}) {layout} would do",
                   share=least / now, now=known / now, layout=base.layout)  # fmt: skip
    return Remedy("shared input", "application", True, sentence, {"shared": least / now, "now": known / now})


def _admission(case: Case, base: Candidate) -> Remedy | None:
    """The most that may be let in at once, or a second."""
    demand = case.demand
    scale = 1 if demand.rate is None else 1000
    now = round((demand.rate or demand.concurrency or 0) * scale)
    most = _largest(lambda n: n > 0 and evaluate(_at(case, n / scale), base.grid, base.settings).does, 0, now)
    if not most:
        return None
    unit = say("requests in flight") if demand.rate is None else say("requests/s")
    sentence = say("{layout} does up to {most:g} {unit}: refuse or hold back what is beyond", layout=base.layout,
                   most=most / scale, unit=unit)  # fmt: skip
    return Remedy("admission", "application", True, sentence, {"most": most / scale, "now": now / scale, "unit": unit})


def _at(case: Case, load: float) -> Case:
    return replace(case, demand=case.demand.at_load(load))


def _kv_in_bytes(case: Case, base: Candidate) -> Remedy | None:
    if base.settings.kv_cache_dtype != "auto":
        return None
    changes = {"kv_cache_dtype": "fp8"}
    found = _set(case, base, "fp8 KV", changes, say("one byte a number: check the answers' quality first"))
    return replace(found, by="quality")


def _same_again(case: Case, base: Candidate, limit: Limit) -> Remedy | None:
    """Whole servers like this one, each with its share of the traffic; nothing of one request gets faster."""
    if limit.load == "low":
        return None
    unit = case.demand.rate or case.demand.concurrency or 0
    number = next((n for n in range(2, MOST_REPLICAS + 1) if _does_share(case, base, unit / n)), None)
    if number is None:
        return None
    gpus = number * base.num_gpus
    sentence = say("{n} servers of {layout} ({gpus} GPUs) with a router before them would do", n=number,
                   layout=base.layout, gpus=gpus)  # fmt: skip
    return Remedy("more of the same server", "hardware", True, sentence, {"servers": number, "gpus": gpus})


def _does_share(case: Case, base: Candidate, share: float) -> bool:
    if case.demand.rate is None and share < 1:
        return False
    return evaluate(_at(case, share), base.grid, base.settings).does


def settings_changed(before: EngineSettings, after: EngineSettings) -> dict[str, Any]:
    """Name → the new value, of what differs."""
    return {
        name: getattr(after, name) for name in EngineSettings.__slots__ if getattr(after, name) != getattr(before, name)
    }


def plain(layout: Layout) -> bool:
    """One GPU, nothing split."""
    return layout.world_size == 1
