"""A question answered: where did TTFT (and TPOT) go, and what holds it up; and between two runs, what grew.

`explain(run)` reads what a run left and answers in words and figures; each verdict stands beside the figures that it
rests on (`labkit.measure.binding`), and says "cannot tell" where they do not carry one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from labkit.measure.achieved import Roofs, achieved, of_phases
from labkit.measure.binding import Evidence, Verdict, Waterfall, band_mean, verdict, waterfall
from labkit.measure.breakdown import SHARES, TPOT_PARTS, TTFT_PARTS, parts_of, tpot_parts_ms, ttft_parts_ms
from labkit.measure.clocks import clocks_of
from labkit.measure.lateness import who_is_late
from labkit.measure.metrics import Window, counted
from labkit.measure.records import RequestRecord, StepRecord
from labkit.measure.statistics import few
from labkit.measure.steady import steady_state

if TYPE_CHECKING:
    import pandas as pd

QUANTILES = (50, 95)
FIGURES = (("TTFT", TTFT_PARTS, ttft_parts_ms), ("TPOT", TPOT_PARTS, tpot_parts_ms))
PHASES = {"TTFT": ("prefill", "mixed"), "TPOT": ("decode", "mixed")}
"""The steps that a figure's compute was spent in."""
RESAMPLES = 400
MIN_GROWTH = 10
"""Requests on each side, for a difference to have an interval."""


class RunLike(Protocol):
    """What is read of a run; `labkit.lab.Run` is one."""

    summary: dict[str, Any]
    records: list[RequestRecord]
    step_records: list[StepRecord]

    @property
    def window(self) -> Window: ...
    @property
    def collectives(self) -> pd.DataFrame: ...


@dataclass(frozen=True)
class Growth:
    """A percentile's change from one run to another, by part, in ms, with 95 % intervals (bootstrap over requests)."""

    figure: str
    q: int
    total: tuple[float, float, float]
    """Change, low, high."""
    parts: dict[str, tuple[float, float, float]]
    few: bool = False
    """Too few requests lie beyond the percentile in one of the runs."""

    @property
    def sentence(self) -> str:
        change, low, high = self.total
        head = f"{self.figure} p{self.q} {change:+.1f} ms ({low:+.1f} to {high:+.1f})"
        if self.few:
            return f"{head}: cannot tell, too few requests for p{self.q}."
        if low <= 0 <= high:
            return f"{head}: cannot tell it from none."
        sure = [(name, row[0]) for name, row in self.parts.items() if row[1] * row[2] > 0 and row[0] * change > 0]
        sure.sort(key=lambda row: -abs(row[1]))
        told = ", ".join(f"{name.replace('_', ' ')} {part:+.1f} ({part / change:.0%})" for name, part in sure[:3])
        return f"{head}: {told or 'no single part for certain'}."


@dataclass(frozen=True)
class Explanation:
    """Shown by its own repr, in HTML or plain text; `to_dict` is what `labkit explain --json` prints."""

    label: str
    waterfalls: list[Waterfall]
    verdicts: list[Verdict]
    steady: dict[str, Any]
    step_kinds: dict[str, dict[str, float]]
    """Phase → its share of the time in steps, and the shares of compute, wait and transfer within."""
    ranks: list[dict[str, Any]]
    roofs: dict[str, float] | None = None
    """What compute was held against: read_gb_s and gflop_s, as measured with all cores."""
    clocks: list[dict[str, Any]] | None = None
    """Of hosts beside the server's, each with its uncertainty; []: one clock; None: not told."""
    steps_unaccounted: float | None = None
    """Of the ranks' time in steps, what is in none of their parts."""
    other: Explanation | None = None
    growth: list[Growth] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "waterfalls": [
                {"figure": w.figure, "percentile": w.q, "parts_ms": w.parts, "total_ms": w.total_ms}
                | {"n": w.n, "few": w.few}
                for w in self.waterfalls
            ],
            "verdicts": [
                {"figure": v.figure, "percentile": v.q, "kind": v.kind, "sentence": v.sentence, "evidence": v.evidence}
                for v in self.verdicts
            ],
            "steady": self.steady,
            "step_kinds": self.step_kinds,
            "ranks": self.ranks,
            "roofs": self.roofs,
            "clocks": self.clocks,
            "steps_unaccounted": self.steps_unaccounted,
            "other": self.other.to_dict() if self.other else None,
            "growth": [
                {"figure": g.figure, "percentile": g.q, "total_ms": g.total, "parts_ms": g.parts}
                | {"few": g.few, "sentence": g.sentence}
                for g in self.growth
            ],
        }

    def __repr__(self) -> str:
        from labkit.measure.explain_text import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from labkit.measure.explain_text import as_html

        return as_html(self)


def explain(run: RunLike, other: RunLike | None = None, roofs: Roofs | None = None) -> Explanation:
    """Where `run`'s TTFT and TPOT went; with `other` (the same under more load, say) also what grew from run to other.

    roofs: the machine's, as measured (`labkit.measure.roofs`); without them products and memory are not told apart.
    """
    rows = {name: _rows(run, of, len(names)) for name, names, of in FIGURES}
    falls = [waterfall(name, names, rows[name], q) for name, names, _ in FIGURES for q in QUANTILES]
    wanted = [(name, q) for name, _, _ in FIGURES for q in QUANTILES]
    verdicts = [_verdict(run, fall, name, q, roofs) for fall, (name, q) in zip(falls, wanted, strict=True)]
    share = run.summary.get("step_share") or {}
    return Explanation(
        _label(run),
        [fall for fall in falls if fall is not None],
        verdicts,
        steady_state(run.records, run.window),
        step_kinds(share),
        list(share.get("by_rank") or []),
        {"read_gb_s": roofs.read_gb_s, "gflop_s": roofs.gflop_s} if roofs else None,
        clocks_of(run.summary),
        share.get("unaccounted"),
        explain(other, roofs=roofs) if other else None,
        list(_what_grew(run, other)) if other else [],
    )


def _label(run: RunLike) -> str:
    summary, rate = run.summary, run.summary.get("rate")
    load = f"{summary['concurrency']} in flight" if summary.get("concurrency") else f"{rate or 0:.3g} requests/s"
    return f"{summary.get('layout') or 'foreign server'}, {summary.get('model')}, {summary.get('workload')} at {load}"


def _rows(run: RunLike, of: Any, width: int) -> NDArray[np.float64]:
    return parts_of(counted(run.records, run.window), of, width)


def _verdict(run: RunLike, fall: Waterfall | None, name: str, q: int, roofs: Roofs | None) -> Verdict:
    steps = [step for step in run.step_records if run.window.start_ns <= step.end_ns <= run.window.end_ns]
    mine = of_phases(steps, PHASES[name])
    why: dict[str, Evidence] = {
        "queue": lambda: _queue(run, name, fall, mine),
        "waiting": lambda: who_is_late(run.collectives, PHASES[name], list(run.summary["step_share"]["by_rank"])),
        "transfer": lambda: _transfer(run, mine),
        "computing": lambda: _mixed(name, mine),
    }
    return verdict(fall, name, q, achieved(mine, run.summary, roofs), why)


def _queue(
    run: RunLike, name: str, fall: Waterfall | None, steps: Sequence[StepRecord]
) -> tuple[str, Mapping[str, Any]]:
    """For TTFT: how many steps it waited for, and whether the ranks had time to spare."""
    idle, queue = run.summary["step_share"].get("idle"), fall.parts["queue"] if fall else 0.0
    if not steps or idle is None:
        return "", {}
    step_ms = float(np.median([step.end_ns - step.start_ns for step in steps])) / 1e6
    figures = {"step_ms": step_ms, "idle": idle}
    if name == "TPOT":
        text = f"Between its steps; a step takes {step_ms:.1f} ms, and the ranks are idle {idle:.0%} of the time."
        return text, figures
    preempted = sum(r.server.num_preemptions for r in counted(run.records, run.window) if r.server)
    evictions = f", {preempted} preemptions" if preempted else ""
    return f"It waits for {queue / step_ms:.1f} steps; the ranks are idle {idle:.0%} of the time{evictions}.", figures


def _mixed(name: str, steps: Sequence[StepRecord]) -> tuple[str, Mapping[str, Any]]:
    """A decode that shares its step with prompts takes as long as they do."""
    spent = {phase: sum(s.end_ns - s.start_ns for s in of_phases(steps, [phase])) for phase in ("decode", "mixed")}
    total = sum(spent.values())
    if name != "TPOT" or not total:
        return "", {}
    share = spent["mixed"] / total
    text = f"{share:.0%} of the time of steps with decodes went to steps that carried prompts too." if share else ""
    return text, {"mixed_of_decode_time": share}


def _transfer(run: RunLike, steps: Sequence[StepRecord]) -> tuple[str, Mapping[str, Any]]:
    moved, spent = sum(s.collective_bytes for s in steps), sum(max(s.transfer_ns, default=0) for s in steps)
    handoff = run.summary.get("handoff") or {}
    text = f"{moved / len(steps) / 1024:.0f} KiB a step in {len(steps)} steps" if steps and moved else ""
    if handoff.get("num"):
        text += f"{'; ' if text else ''}handoffs at {handoff['mib_per_s']:.0f} MiB/s"
    return f"{text}." if text else "", {"bytes": moved, "transfer_s": spent / 1e9}


def step_kinds(step_share: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    phases = step_share.get("by_phase") or {}
    total = sum(phase["rank_time_s"] for phase in phases.values())
    return {
        name: {"of_step_time": phase["rank_time_s"] / total if total else 0.0, "num_steps": phase["num_steps"]}
        | {share: phase[share] for share in SHARES}
        for name, phase in phases.items()
    }


# ---- what grew


def _what_grew(run: RunLike, other: RunLike) -> Iterator[Growth]:
    for name, names, of in FIGURES:
        here, there = (_rows(each, of, len(names)) for each in (run, other))
        if min(len(here), len(there)) >= MIN_GROWTH:
            yield from (_growth(here, there, name, names, q) for q in QUANTILES)


def _growth(
    here: NDArray[np.float64], there: NDArray[np.float64], name: str, names: tuple[str, ...], q: int
) -> Growth:
    rng = np.random.default_rng(0)
    change = band_mean(there, q) - band_mean(here, q)
    draws = np.array([band_mean(_again(there, rng), q) - band_mean(_again(here, rng), q) for _ in range(RESAMPLES)])
    low, high = np.percentile(draws, [2.5, 97.5], axis=0)
    ends = np.percentile(draws.sum(axis=1), [2.5, 97.5])
    parts = {part: (float(change[i]), float(low[i]), float(high[i])) for i, part in enumerate(names)}
    total = (float(change.sum()), float(ends[0]), float(ends[1]))
    return Growth(name, q, total, parts, f"p{q}" in few(min(len(here), len(there))))


def _again(rows: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    return rows[rng.integers(0, len(rows), len(rows))]
