"""What a visitor has pinned: a stored run of any engine, or the layout that just ran, beside the current figures.

A stored run's goodput is worked out anew under the objectives that the page has just now, from its requests; what its
recorder did not tell stays empty and is named. Differing conditions are named too: a difference between two runs is a
layout's only where nothing else differs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from labkit.lab.answers import explain_stored
from labkit.lab.run import Run, open_store, refuse_profiled
from labkit.lab.stored import origin_of, short_name
from labkit.measure import metrics
from labkit.measure.difference import differences
from labkit.measure.records import MemoryRecord
from labkit.show import frame_run as r
from labkit.show.from_answers import PARTS, why_of

_EVERY_S = 2.0
_CLOSE_RATE = 0.05
"""Of the rate: Poisson arrivals of a minute differ by more among themselves."""
Samples = dict[str, NDArray[np.float64]]


class Pinned:
    """`run`: a stored one; None for a layout that was pinned while it ran, of which `samples` are kept."""

    def __init__(self, samples: Samples, run: Run | None = None, at: str = "") -> None:
        self._samples, self._run, self._at = samples, run, at
        self._rows = metrics.counted(run.records, run.window) if run else []
        self._why = why_of(explain_stored(run)) if run else None
        self._goodput: tuple[metrics.Objective | None, r.Goodput] = (None, r.Goodput())
        self._differences: tuple[float, list[r.Difference]] = (0.0, [])

    @classmethod
    def stored(cls, run_id: str) -> Pinned:
        """Raises KeyError or ValueError with a sentence."""
        with open_store() as store:
            run, at = Run.load(run_id, store), str(store.run(run_id)["started_at"] or "")
        if "ttft_ms" not in run.summary:
            raise ValueError(f"Run {run_id} is {run.status}: it has no figures that could be shown.")
        refuse_profiled([run])
        done = [row for row in metrics.counted(run.records, run.window) if row.status == "completed"]
        figures = {"ttft_ms": metrics.ttft_ms, "tpot_ms": metrics.tpot_ms}
        known = {name: [value for row in done if (value := of(row)) is not None] for name, of in figures.items()}
        return cls({name: np.array(values, np.float64) for name, values in known.items()}, run, _short(at))

    def beside(
        self, snapshot: Mapping[str, Any] | None, samples: Samples | None, objective: metrics.Objective
    ) -> r.Beside:
        """snapshot and samples: of the current load; None without a lab server."""
        found = self._of_stored(snapshot, objective) if self._run else r.Beside("")
        found.differences = self._against(samples) if samples else []
        return found

    def _of_stored(self, snapshot: Mapping[str, Any] | None, objective: metrics.Objective) -> r.Beside:
        assert self._run is not None
        summary, origin = self._run.summary, origin_of(self._run.summary)
        memory = [msgspec.convert(row, MemoryRecord, strict=False) for row in summary.get("memory_bytes") or []]
        return r.Beside(
            self._run.run_id,
            self._as_run(objective),
            at=self._at,
            recorder=origin.recorder,
            memory=memory,
            why=self._why if self._why and self._why.waterfalls else None,
            missing=list(_missing(summary)),
            conditions=conditions(summary, snapshot),
            remarks=_remarks(summary),
        )

    def _as_run(self, objective: metrics.Objective) -> r.Run:
        assert self._run is not None
        summary, settings = self._run.summary, self._run.summary.get("settings") or {}
        parts = summary.get("ttft_parts_ms") or {}
        return r.Run(
            layout=summary.get("layout") or "",
            layout_name=short_name(summary),
            workload=summary.get("workload") or "",
            rate=summary.get("rate"),
            router=settings.get("router", ""),
            admission=settings.get("admission", ""),
            started_at=self._at,
            num_completed=summary["requests"]["completed"],
            num_failed=summary["requests"]["failed"],
            ttft_ms=_percentiles(summary["ttft_ms"]),
            tpot_ms=_percentiles(summary["tpot_ms"]),
            ttft_parts_ms={PARTS.get(name, name): value for name, value in parts.items()},
            goodput=self._goodput_under(objective),
            **summary["throughput"],
        )

    def _goodput_under(self, objective: metrics.Objective) -> r.Goodput:
        assert self._run is not None
        if self._goodput[0] != objective:
            found = metrics.goodput(self._rows, objective, self._run.window.seconds)
            low, high = found["attainment_interval"] if found["scheduled"] else (None, None)
            made = r.Goodput(found["requests_per_s"], found["attainment"], low, high)
            self._goodput = (objective, made)
        return self._goodput[1]

    def _against(self, samples: Samples) -> list[r.Difference]:
        at, found = self._differences
        if time.monotonic() - at > _EVERY_S:
            found = [self._difference(row) for row in differences(samples, self._samples)]
            self._differences = (time.monotonic(), found)
        return found

    def _difference(self, row: dict[str, Any]) -> r.Difference:
        low, high = row["interval"] or (None, None)
        then = self._samples[row["figure"]]
        return r.Difference(
            row["figure"], row["percentile"], row["difference"], low, high,
            float(np.percentile(then, row["percentile"])) if len(then) else None,
            row["n"], row["n_then"], row["few"], row["verdict"],
        )  # fmt: skip


def _percentiles(ladder: Mapping[str, Any]) -> r.Percentiles:
    return r.Percentiles(**{name: ladder[name] for name in r.Percentiles.__struct_fields__ if name in ladder})


def _short(iso: str) -> str:
    """2026-01-31 09:30"""
    return iso[:16].replace("T", " ")


def _missing(summary: Mapping[str, Any]) -> Iterator[str]:
    if all(value is None for value in (summary.get("ttft_parts_ms") or {}).values()):
        yield "parts"
    if not summary.get("memory_bytes"):
        yield "memory"
    if (summary.get("step_share") or {}).get("compute") is None:
        yield "steps"


def _remarks(summary: Mapping[str, Any]) -> list[str]:
    """Against itself, and where it was measured otherwise. Few samples are drawn as such."""
    return [
        verdict["sentence"]
        for verdict in summary.get("quality") or []
        if verdict["code"] == "imported" or (verdict["severity"] in ("warn", "bad") and verdict["code"] != "samples")
    ]


# ---- conditions


def conditions(summary: Mapping[str, Any], snapshot: Mapping[str, Any] | None) -> list[r.Condition]:
    """What has to be equal for a difference to be the layout's, and the layout itself."""
    state, load = (snapshot or {}).get("state") or {}, (snapshot or {}).get("run") or {}
    environment = summary.get("environment") or {}
    here_environment = state.get("environment") or {}
    origin = origin_of(summary)
    rows = [
        ("engine", "labkit" if state else "", origin.engine),
        ("model", state.get("model", ""), _base(summary.get("model"))),
        ("workload", load.get("workload", ""), "" if origin.file else summary.get("workload") or ""),
        ("rate", _load(load), _load(summary)),
        ("layout", load.get("layout") or state.get("layout", ""), summary.get("layout") or ""),
        ("machine", _machine(here_environment), _machine(environment)),
        ("dtype", state.get("dtype", ""), _dtype(environment)),
    ]
    return [r.Condition(name, here, there, _same(name, here, there)) for name, here, there in rows]


def _base(model: str | None) -> str:
    """A folder's own name: the path to it says nothing of the checkpoint."""
    return (model or "").rstrip("/").rpartition("/")[2]


def _dtype(environment: Mapping[str, Any]) -> str:
    """auto is what the engine made of it, and it did not say what."""
    dtype = environment.get("dtype", "")
    return "" if dtype == "auto" else dtype


def _machine(environment: Mapping[str, Any]) -> str:
    """A CPU has no name that all engines would give it: its host and cores tell it."""
    if not environment:
        return ""
    device = "cpu" if environment.get("backend") == "cpu" else environment["device"]
    return f"{environment['host']}, {device}, {environment['num_cores']} cores"


def _load(load: Mapping[str, Any]) -> str:
    if load.get("concurrency"):
        return f"{load['concurrency']} in flight"
    return f"{load['rate']:.3g}/s" if load.get("rate") else ""


def _same(name: str, here: str, there: str) -> bool | None:
    if not here or not there:
        return None
    if name == "rate" and here.endswith("/s") and there.endswith("/s"):
        one, other = float(here[:-2]), float(there[:-2])
        return abs(one - other) <= _CLOSE_RATE * max(one, other)
    return here == there
