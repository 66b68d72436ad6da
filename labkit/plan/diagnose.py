"""From a run and an objective to what is short: which metric fails, at which load, for want of what, by which evidence.

The queue is looked at before the work: a request that waited tells nothing yet of how fast the ranks are. Then what the
queue waits for (KV memory, the engine's own limits, the ranks), then the work itself. Every resource gets an answer:
short, enough, or not measured, with the run that would measure it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labkit.measure.binding import DOMINANT
from labkit.measure.explain import RunLike
from labkit.plan.findings import (
    BANDWIDTH,
    COMMUNICATION,
    COMPUTE,
    KV,
    LOW_RUN,
    MANY_FULL,
    NONE,
    NOT_MEASURED,
    QUEUE,
    SHORT,
    Finding,
    all_findings,
)
from labkit.plan.objective import Outcome, PlanObjective, judge
from labkit.plan.signals import Signals, read_signals

ALONE = 1.2
"""Prompts of a step, on average: with more, what a prompt's steps took was others' work too."""


@dataclass(frozen=True)
class Diagnosis:
    """`resource` is one of RESOURCES, none (nothing asked is missed) or not measured; `cause` a word for scripts."""

    metric: str
    """The wish that is missed and decides; empty where none is."""
    resource: str
    cause: str
    load: str
    """low: it fails even alone; high: it fails only beside others; not measured; empty where nothing fails."""
    sentence: str
    outcomes: tuple[Outcome, ...] = ()
    findings: tuple[Finding, ...] = ()
    measure: tuple[str, ...] = ()
    source: str = ""

    def finding(self, resource: str) -> Finding:
        return next(finding for finding in self.findings if finding.resource == resource)

    def to_dict(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "resource": self.resource,
            "cause": self.cause,
            "load": self.load,
            "sentence": self.sentence,
            "source": self.source,
            "outcomes": [outcome.to_dict() for outcome in self.outcomes],
            "findings": [finding.to_dict() for finding in self.findings],
            "measure": list(self.measure),
        }


def diagnose(
    run_summary: Mapping[str, Any],
    objective: PlanObjective,
    *,
    run: RunLike | None = None,
    low_load: Mapping[str, Any] | None = None,
) -> Diagnosis:
    """What a run is short of. run: the run itself, for its requests and steps; low_load: the summary of the same server
    asked by one request at a time. Raises ValueError for a summary without latencies, or an objective without a wish.
    """
    if objective.asks_nothing:
        raise ValueError("Nothing is asked: give --ttft-p95-ms, --tpot-p95-ms, or tokens per second.")
    if not (run_summary.get("ttft_ms") or {}).get("n"):
        raise ValueError("That run has no latencies (it failed, or nobody was answered): there is nothing to diagnose.")
    signals = read_signals(run_summary, run, objective.percentile)
    outcomes = tuple(_judged(run_summary, objective))
    missed = [outcome for outcome in outcomes if not outcome.met]
    alone = _judged(low_load, objective) if low_load else None
    findings = all_findings(signals, missed)
    if not missed:
        return _nothing_missed(signals, outcomes, findings, objective)
    metric, finding, cause = _what_decides(signals, missed, findings)
    load = _load_of(metric, missed, signals, cause, alone)
    return Diagnosis(
        metric.metric, finding.resource if finding else NOT_MEASURED, cause, load,
        _told(metric, finding, load, signals), outcomes, findings, _runs(findings, load, finding), signals.source,
    )  # fmt: skip


def _judged(summary: Mapping[str, Any], objective: PlanObjective) -> list[Outcome]:
    tokens = (summary.get("throughput") or {}).get("output_tokens_per_s")
    return judge(objective, summary.get("ttft_ms") or {}, summary.get("tpot_ms") or {}, tokens)


def _nothing_missed(
    signals: Signals, outcomes: tuple[Outcome, ...], findings: tuple[Finding, ...], objective: PlanObjective
) -> Diagnosis:
    if not outcomes:
        return Diagnosis("", NOT_MEASURED, "no figure", "", f"The run has no figure for {objective}.", outcomes,
                         findings, (LOW_RUN,), signals.source)  # fmt: skip
    nearest = max(outcomes, key=lambda outcome: outcome.ratio)
    sentence = f"Nothing asked is missed; nearest to its limit is {nearest.name}: {nearest}."
    return Diagnosis("", NONE, "met", "", sentence, outcomes, findings, (), signals.source)


# ---- which of them decides


def _what_decides(
    signals: Signals, missed: list[Outcome], findings: tuple[Finding, ...]
) -> tuple[Outcome, Finding | None, str]:
    """(the wish, the resource or None: not measured, a word for the cause)."""
    by_name = {finding.resource: finding for finding in findings}
    ttft = next((outcome for outcome in missed if outcome.metric == "ttft"), None)
    if ttft is not None and by_name[QUEUE].state == SHORT:
        return (ttft, *_behind_queue(signals, by_name))
    if ttft is not None and by_name[QUEUE].state == NOT_MEASURED:
        return ttft, None, "queue or work"
    worst = max(missed, key=lambda outcome: outcome.ratio)
    if worst.metric != "ttft" and signals.preemptions:
        return worst, by_name[KV], "kv-full"
    if worst.metric == "server_tokens" and (signals.idle or 0.0) >= MANY_FULL:
        return worst, None, "too little load"
    if worst.metric in ("tpot", "answer_tokens") and (signals.mixed_share or 0.0) >= DOMINANT:
        return worst, by_name[COMPUTE], "interference"
    return (worst, *_behind_work(signals, worst, by_name))


def _behind_queue(signals: Signals, by_name: Mapping[str, Finding]) -> tuple[Finding, str]:
    if by_name[KV].state == SHORT:
        return by_name[KV], "kv-full"
    if (signals.full_seqs or 0.0) >= MANY_FULL:
        return by_name[QUEUE], "max_num_seqs"
    if signals.idle is not None and signals.idle >= MANY_FULL:
        return by_name[QUEUE], "bursts"
    return by_name[QUEUE], "ranks busy"


def _behind_work(signals: Signals, worst: Outcome, by_name: Mapping[str, Finding]) -> tuple[Finding | None, str]:
    figure = "ttft" if worst.metric == "ttft" else "tpot"
    kind = signals.kinds.get(figure, "")
    if kind == "transfer-bound" or by_name[COMMUNICATION].state == SHORT:
        return by_name[COMMUNICATION], "transfer"
    if kind == "waiting":
        return by_name[COMMUNICATION], "late rank"
    if kind == "outside":
        return None, "outside the engine"
    short = next((by_name[name] for name in (COMPUTE, BANDWIDTH) if by_name[name].state == SHORT), None)
    return short, "overhead" if kind == "overhead-bound" else "work"


def _load_of(
    metric: Outcome, missed: list[Outcome], signals: Signals, cause: str, alone: list[Outcome] | None
) -> str:
    """Whether it fails by itself or only beside others."""
    if alone is not None:
        same = next((outcome for outcome in alone if outcome.metric == metric.metric), None)
        return NOT_MEASURED if same is None else "high" if same.met else "low"
    if cause in ("kv-full", "max_num_seqs", "ranks busy", "bursts", "interference"):
        return "high"
    if signals.in_flight is not None and signals.in_flight <= 1.5 * signals.num_replicas:
        return "low"
    if metric.metric == "ttft" and signals.tells_parts:
        own = sum(signals.parts_ms["ttft"].values()) - (signals.part_ms("ttft", "queue") or 0.0)
        beside = (signals.mixed_share or 0.0) >= DOMINANT or (signals.prompts_together or 1.0) > ALONE
        return "low" if own > metric.limit and not beside else NOT_MEASURED
    return NOT_MEASURED


_LOADS = {"low": "already at low load", "high": "at high load", NOT_MEASURED: "at a load of which "
          "the low end was not measured"}  # fmt: skip


def _told(metric: Outcome, finding: Finding | None, load: str, signals: Signals) -> str:
    head = f"{metric}, {_LOADS[load]}."
    if finding is None:
        return f"{head} What is short was not measured by this run ({signals.source})."
    if finding.resource == KV:
        return f"{head} KV memory is short: {finding.sentence}"
    return f"{head} Short is {finding.resource}: {finding.sentence}"


def _runs(findings: tuple[Finding, ...], load: str, decided: Finding | None) -> tuple[str, ...]:
    """What to measure next: what would decide, then what would make it sure."""
    wanted = [finding.measure for finding in findings if finding.measure and (decided is None or finding is decided)]
    if load == NOT_MEASURED:
        wanted.append(LOW_RUN)
    return tuple(dict.fromkeys(wanted))
