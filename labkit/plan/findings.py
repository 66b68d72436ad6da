"""Each resource of a run by itself: short, enough, or not measured, with its evidence and what would measure it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from labkit.measure.binding import DOMINANT
from labkit.plan.objective import Outcome
from labkit.plan.signals import Signals

QUEUE, KV, PARAMETERS = "queue", "KV memory", "parameter memory"
COMMUNICATION, COMPUTE, BANDWIDTH = "communication", "compute", "memory bandwidth"
RESOURCES = (QUEUE, KV, PARAMETERS, COMMUNICATION, COMPUTE, BANDWIDTH)
NONE, NOT_MEASURED = "none", "not measured"
SHORT, ENOUGH = "short", "enough"

FULL_KV = 0.95
"""Of the blocks in use: vLLM counts a cache as full when the next request's blocks are not there, a little below 1."""
MANY_FULL = 0.5
"""Of the steps: where half of them are at a limit, the limit decides."""
LOW_RUN = "labkit run … --concurrency 1 (one request in flight: no queue, no batch)"


@dataclass(frozen=True)
class Finding:
    """One resource's answer. `measure`: the run that would tell, where this one does not."""

    resource: str
    state: str
    sentence: str
    figures: dict[str, float] = field(default_factory=dict)
    measure: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {"resource": self.resource, "state": self.state, "sentence": self.sentence, "figures": self.figures,
                "measure": self.measure}  # fmt: skip


def all_findings(signals: Signals, missed: list[Outcome]) -> tuple[Finding, ...]:
    queue = _queue(signals, missed)
    return (
        queue, _kv(signals, queue), _parameters(signals), _communication(signals), *_work(signals, missed)
    )  # fmt: skip


def _queue(signals: Signals, missed: list[Outcome]) -> Finding:
    waited, total = signals.part_ms("ttft", "queue"), sum((signals.parts_ms.get("ttft") or {}).values())
    ttft = next((outcome for outcome in missed if outcome.metric == "ttft"), None)
    if waited is not None and total > 0:
        share = waited / total
        figures = {"queue_ms": waited, "share": share}
        text = f"A request waits {waited:.0f} ms before its first step, {share:.0%} of its TTFT"
        without = f"; without it TTFT would be {total - waited:.0f} ms"
        decides = share >= DOMINANT or (ttft is not None and total - waited <= ttft.limit < total)
        return Finding(QUEUE, SHORT if decides else ENOUGH, f"{text}{without if decides else ''}.", figures)
    if signals.waiting is not None:
        figures = {"waiting": signals.waiting}
        state = SHORT if signals.waiting >= 1 else ENOUGH
        return Finding(QUEUE, state, f"{signals.waiting:.1f} requests wait in the engine on average.", figures)
    if signals.one_at_a_time:
        return Finding(QUEUE, ENOUGH, "No more requests than replicas are in flight: there is nothing to wait for.")
    if signals.growing:
        return Finding(QUEUE, SHORT, "The requests in flight grow all through the run, and TTFT with them.")
    return Finding(QUEUE, NOT_MEASURED, "Nothing tells how long a request waits in this server before its first step.",
                   measure=f"{LOW_RUN}; or labkit run --engine …, which reads the engine's own queue")  # fmt: skip


def _kv(signals: Signals, queue: Finding) -> Finding:
    figures = _known(kv_use_max=signals.kv_use_max, preemptions=signals.preemptions)
    if signals.preemptions:
        return Finding(KV, SHORT, f"{signals.preemptions} requests were preempted for want of KV blocks.", figures)
    if signals.kv_use_max is not None and signals.kv_use_max >= FULL_KV:
        return Finding(KV, SHORT, f"KV was {signals.kv_use_max:.0%} in use.", figures)
    if queue.state == SHORT and _had_room(signals):
        used = "" if signals.kv_use_max is None else f"; steps read {signals.kv_use_max:.0%} of what fits at most"
        return Finding(KV, SHORT, f"Requests waited while steps had room for them ({_room(signals)}){used}: what the "
                       "queue waits for is blocks of KV, taken or reserved.", figures)  # fmt: skip
    if signals.kv_use_max is not None:
        return Finding(KV, ENOUGH, f"At most {signals.kv_use_max:.0%} of KV was in use.", figures)
    return Finding(KV, NOT_MEASURED, "Nothing tells how full KV was.", figures,
                   "labkit run --engine … (reads the engine's KV gauge), or a run of our own engine")  # fmt: skip


def _had_room(signals: Signals) -> bool:
    """Neither the sequences nor the tokens of most steps were at their limits."""
    if signals.full_seqs is None or signals.full_budget is None:
        return False
    return signals.full_seqs < MANY_FULL and signals.full_budget < MANY_FULL


def _room(signals: Signals) -> str:
    return f"at most {signals.running_max or 0:.0f} of {signals.max_num_seqs} sequences, {signals.full_budget:.0%} " \
           f"of steps at {signals.max_num_batched_tokens} tokens"  # fmt: skip


def _parameters(signals: Signals) -> Finding:
    if signals.weights_share is None:
        return Finding(PARAMETERS, ENOUGH, "It serves, so its weights fit.")
    share = signals.weights_share
    return Finding(PARAMETERS, ENOUGH, f"Weights take {share:.0%} of what the fullest rank has for weights and KV.",
                   {"weights_share": share})  # fmt: skip


def _communication(signals: Signals) -> Finding:
    if signals.transfer_share is None:
        return Finding(COMMUNICATION, NOT_MEASURED, "Nothing tells the time in collectives.",
                       measure="labkit run (our engine records every crossing), or labkit profile")  # fmt: skip
    busy = 1 - (signals.idle or 0.0)
    share = signals.transfer_share / busy if busy > 0 else 0.0
    wait = (signals.wait_share or 0.0) / busy if busy > 0 else 0.0
    figures = {"transfer_share": share, "wait_share": wait}
    state = SHORT if share >= DOMINANT else ENOUGH
    return Finding(COMMUNICATION, state, f"Of the time in steps, {share:.0%} is transfer and {wait:.0%} waiting for "
                   "another rank.", figures)  # fmt: skip


_WORK_OF = {"compute-bound": COMPUTE, "bandwidth-bound": BANDWIDTH, "overhead-bound": COMPUTE, "computing": COMPUTE}


def _work(signals: Signals, missed: list[Outcome]) -> tuple[Finding, Finding]:
    """Compute and memory bandwidth: held against roofs where there are any."""
    figure = "tpot" if any(outcome.metric in ("tpot", "answer_tokens") for outcome in missed) else "ttft"
    kind, sentence = signals.kinds.get(figure, ""), signals.verdicts.get(figure, "")
    bench = "labkit bench device (the roofs of this machine), then the same run"
    if kind in ("compute-bound", "bandwidth-bound"):
        held = _WORK_OF[kind]
        return tuple(  # type: ignore[return-value]  # two of them
            Finding(name, SHORT if name == held else ENOUGH, sentence) for name in (COMPUTE, BANDWIDTH)
        )
    if kind == "overhead-bound":
        return Finding(COMPUTE, SHORT, sentence), Finding(BANDWIDTH, ENOUGH, sentence)
    computing = signals.part_ms(figure, "prefill_compute", "compute")
    total = sum((signals.parts_ms.get(figure) or {}).values())
    if computing is not None and total > 0:
        share = computing / total
        state, name = (SHORT if share >= DOMINANT else ENOUGH), figure.upper()
        text = f"The ranks' own work is {share:.0%} of {name}"
        which = COMPUTE if figure == "ttft" else BANDWIDTH  # a prefill multiplies, a decode reads
        other = BANDWIDTH if which == COMPUTE else COMPUTE
        told = Finding(which, state, f"{text}; which roof it is near was not measured, by its kind it is this one.",
                       {"share": share}, bench)  # fmt: skip
        rest = Finding(other, NOT_MEASURED, f"{text}; no roof is known to hold it against.", measure=bench)
        return (told, rest) if which == COMPUTE else (rest, told)
    return tuple(  # type: ignore[return-value]  # two of them
        Finding(name, NOT_MEASURED, "Nothing tells what the ranks did.", measure="a run of our own engine, or "
                "labkit profile") for name in (COMPUTE, BANDWIDTH)
    )  # fmt: skip


def _known(**figures: float | None) -> dict[str, float]:
    return {name: float(value) for name, value in figures.items() if value is not None}
