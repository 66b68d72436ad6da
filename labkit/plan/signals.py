"""What a run tells about its own limit, brought to one form: ours, another engine's, an imported file, a simulation.

Our engine tells each request's parts and each step; a production engine its gauges of waiting, running and KV; an
imported file only what the client saw. What is not told stays None, and nothing is guessed from its absence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from labkit.layout import LayoutError, kv_bytes_per_token, pools_of, read_layout
from labkit.measure.breakdown import phase_of
from labkit.measure.explain import Explanation, RunLike, explain
from labkit.measure.metrics import counted
from labkit.measure.records import StepRecord
from labkit.model.spec import DTYPE_BYTES, load_spec

FULL_STEP = 0.95
"""Of a step's token budget or its sequences: a step that has so many had no room for a waiting request."""


@dataclass(frozen=True)
class Signals:
    """Times in ms; shares from 0 to 1; None where the run does not tell."""

    source: str
    parts_ms: dict[str, dict[str, float]] = field(default_factory=dict)
    """Figure (ttft, tpot) → part → ms, around the judged percentile, or of the mean request."""
    kinds: dict[str, str] = field(default_factory=dict)
    """Figure → what holds its steps up, where they were held against roofs (`labkit.measure.binding`)."""
    verdicts: dict[str, str] = field(default_factory=dict)
    """Figure → the sentence of that."""
    mixed_share: float | None = None
    """Of the time of steps with decodes, in steps that carried prompts too."""
    idle: float | None = None
    """Of the ranks' time."""
    transfer_share: float | None = None
    wait_share: float | None = None
    waiting: float | None = None
    """Requests in the queue, on average."""
    running_max: float | None = None
    kv_use_max: float | None = None
    preemptions: int | None = None
    full_seqs: float | None = None
    """Of the steps that began while a request waited for its first, those at max_num_seqs."""
    full_budget: float | None = None
    """Of the same steps, those at max_num_batched_tokens."""
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    growing: bool | None = None
    """Whether the requests in flight grew all through the run."""
    in_flight: float | None = None
    """Requests in the server, on average."""
    one_at_a_time: bool = False
    """A closed loop of no more requests than replicas."""
    prompts_together: float | None = None
    """Prompts of a step that carries any, on average."""
    num_replicas: int = 1
    weights_share: float | None = None
    """Of what a rank has for weights and KV, the fullest rank's weights."""
    kv_bytes: int | None = None
    """Of the rank with the least."""

    @property
    def tells_parts(self) -> bool:
        return bool(self.parts_ms.get("ttft"))

    def part_ms(self, figure: str, *names: str) -> float | None:
        parts = self.parts_ms.get(figure)
        return sum(parts.get(name, 0.0) for name in names) if parts else None


def read_signals(summary: Mapping[str, Any], run: RunLike | None = None, percentile: str = "p95") -> Signals:
    """From a stored summary; with the run itself (its requests and steps) more of them."""
    metrics = (summary.get("engine") or {}).get("metrics") or {}
    told: dict[str, Any] = {
        "source": _source(summary),
        "parts_ms": _mean_parts(summary),
        "growing": _growing(summary),
        "in_flight": _in_flight(summary),
        "waiting": _gauge(metrics, "waiting", "mean"),
        "running_max": _gauge(metrics, "running", "max"),
        "kv_use_max": _gauge(metrics, "kv_use", "max"),
        "preemptions": None if metrics.get("preemptions") is None else round(metrics["preemptions"]),
        "num_replicas": _replicas(summary),
        "one_at_a_time": 0 < (summary.get("concurrency") or 0) <= _replicas(summary),
        **_steps_told(summary),
        **_memory_told(summary),
    }
    if run is not None and run.step_records:
        told |= _from_steps(summary, run)
        told |= _from_explanation(explain(run), percentile)
    return Signals(**{name: value for name, value in told.items() if value is not None})


def _source(summary: Mapping[str, Any]) -> str:
    engine = summary.get("engine") or {}
    if summary.get("simulated"):
        return "simulated"
    if engine.get("imported"):
        return str(engine["imported"].get("tool") or "imported")
    return str(engine.get("name") or ("labkit" if summary.get("layout") else "foreign"))


def _mean_parts(summary: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    found = {}
    for figure in ("ttft", "tpot"):
        parts = summary.get(f"{figure}_parts_ms") or {}
        if any(value is not None for value in parts.values()):
            found[figure] = {name: float(value or 0.0) for name, value in parts.items()}
    return found


def _gauge(metrics: Mapping[str, Any], name: str, which: str) -> float | None:
    gauge = metrics.get(name)
    return float(gauge[which]) if gauge else None


def _growing(summary: Mapping[str, Any]) -> bool | None:
    steady = summary.get("steady") or {}
    if steady.get("steady") is None:
        return None
    return bool(not steady["steady"] and steady.get("why") == "queue")


def _in_flight(summary: Mapping[str, Any]) -> float | None:
    """Given by a closed loop; else by Little's law: arrivals a second times how long each stays."""
    if summary.get("concurrency"):
        return float(summary["concurrency"])
    rate = (summary.get("throughput") or {}).get("requests_per_s")
    stay_ms = (summary.get("e2el_ms") or {}).get("mean")
    return rate * stay_ms / 1e3 if rate and stay_ms else None


def _replicas(summary: Mapping[str, Any]) -> int:
    try:
        return sum(pool.layout.dp for pool in pools_of(read_layout(summary.get("layout") or "tp1")))
    except LayoutError:
        return 1


def _steps_told(summary: Mapping[str, Any]) -> dict[str, Any]:
    share, settings = summary.get("step_share") or {}, summary.get("settings") or {}
    return {
        "idle": share.get("idle"),
        "transfer_share": share.get("transfer"),
        "wait_share": share.get("wait"),
        "max_num_seqs": settings.get("max_num_seqs"),
        "max_num_batched_tokens": settings.get("max_num_batched_tokens"),
    }


def _memory_told(summary: Mapping[str, Any]) -> dict[str, Any]:
    ranks = [rank for rank in summary.get("memory_bytes") or [] if rank.get("weights")]
    if not ranks:
        return {}
    shares = [rank["weights"] / max(1, rank["weights"] + rank["kv"] + rank.get("free", 0)) for rank in ranks]
    return {"weights_share": max(shares), "kv_bytes": min(rank["kv"] for rank in ranks)}


# ---- of our own engine's steps


def _from_steps(summary: Mapping[str, Any], run: RunLike) -> dict[str, Any]:
    window = run.window
    steps = [step for step in run.step_records if window.start_ns <= step.end_ns <= window.end_ns]
    rows = [record.server for record in counted(run.records, run.window) if record.server]
    waited_for = _while_waiting(steps, run)
    with_decodes = [step for step in steps if step.num_decode_seqs]
    prompts = [step.num_prefill_seqs for step in steps if step.num_prefill_seqs]
    spent = sum(step.end_ns - step.start_ns for step in with_decodes)
    mixed = sum(step.end_ns - step.start_ns for step in with_decodes if phase_of(step) == "mixed")
    return {
        "preemptions": sum(times.num_preemptions for times in rows) if rows else None,
        "mixed_share": mixed / spent if spent else None,
        "prompts_together": sum(prompts) / len(prompts) if prompts else None,
        "running_max": max((step.num_prefill_seqs + step.num_decode_seqs for step in steps), default=None),
        "full_seqs": _full(waited_for, summary, "max_num_seqs"),
        "full_budget": _full(waited_for, summary, "max_num_batched_tokens"),
        "kv_use_max": _kv_use(summary, steps),
    }


def _while_waiting(steps: Sequence[StepRecord], run: RunLike) -> list[StepRecord]:
    """The steps that began while some request, whatever became of it, had been received and not begun."""
    told = [record.server for record in run.records if record.server and record.server.first_start_ns]
    received, begun = (np.sort([getattr(times, name) for times in told]) for name in ("received_ns", "first_start_ns"))
    starts = [step.start_ns for step in steps]
    waiting = np.searchsorted(received, starts, "right") - np.searchsorted(begun, starts, "right")
    return [step for step, count in zip(steps, waiting, strict=True) if count > 0]


def _full(steps: Sequence[StepRecord], summary: Mapping[str, Any], name: str) -> float | None:
    most = (summary.get("settings") or {}).get(name)
    if not most or not steps:
        return None
    seqs = name == "max_num_seqs"
    used = [
        step.num_decode_seqs + (step.num_prefill_seqs if seqs else step.prefill_tokens) for step in steps
    ]
    return sum(value >= FULL_STEP * most for value in used) / len(used)


def _kv_use(summary: Mapping[str, Any], steps: Sequence[StepRecord]) -> float | None:
    """Tokens that the steps read over those that fit: less than is held, since reserves do not count."""
    try:
        spec, layout = load_spec(summary["model"]), pools_of(read_layout(summary["layout"]))[0].layout
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    dtype = DTYPE_BYTES.get((summary.get("environment") or {}).get("dtype") or "", spec.dtype_bytes)
    kv = {rank["rank"]: rank["kv"] for rank in summary.get("memory_bytes") or []}
    each = kv_bytes_per_token(layout, spec, 0, dtype)
    if not kv.get(0) or not each or not steps:
        return None
    return max(step.context_tokens for step in steps) * each / kv[0]


def _from_explanation(told: Explanation, percentile: str) -> dict[str, Any]:
    """Parts around the judged percentile (p50 or p95, whichever is nearer), and what the steps are held up by."""
    q = 50 if percentile == "p50" else 95
    parts = {fall.figure.lower(): fall.parts for fall in told.waterfalls if fall.q == q and not fall.few}
    kinds = {verdict.figure.lower(): verdict for verdict in told.verdicts if verdict.q == q}
    known = {figure: verdict for figure, verdict in kinds.items() if verdict.kind != "cannot tell"}
    return {
        "parts_ms": {**{fall.figure.lower(): fall.parts for fall in told.waterfalls if fall.q == 50}, **parts} or None,
        "kinds": {figure: verdict.kind for figure, verdict in known.items()},
        "verdicts": {figure: verdict.sentence for figure, verdict in known.items()},
    }
