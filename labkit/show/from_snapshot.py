"""From a `LiveSession`'s snapshot to the page's frame: names, order and units are settled here.

Counts of single seconds (a request more, a request less) hop; a line over time shows the mean of the last five.
"""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from labkit.measure.records import MemoryRecord
from labkit.show import frame as f
from labkit.show import frame_run as r
from labkit.show.from_answers import PARTS, steady_of, why_of
from labkit.show.from_axes import crossings_of, experts_of, gantt_of, handoff_of, kv_of, name_of, pools_of

Snapshot = dict[str, Any]
SMOOTH_S = 5
SPAN_S = 60
SHOWN_SEVERITIES = ("warn", "bad")
SAID_ELSEWHERE = ("samples",)
"""Verdicts that a panel shows by itself: pale bars are percentiles of too few samples."""


def frame_of(snapshot: Snapshot) -> f.LayoutsFrame:
    """Everything but what the page itself knows (objective as dragged, workloads, notices of its own)."""
    state = snapshot["state"]
    lab = lab_of(state, snapshot) if state else None
    waiting = snapshot["waiting_in_line"] or {}
    return f.LayoutsFrame(
        link=snapshot["link"],
        link_message=snapshot["message"],
        role=snapshot["role"],
        position=int(waiting.get("position", 0)),
        lab=lab,
        run=run_of(snapshot),
        why=why_of(snapshot["explanation"]),
        steady=steady_of(snapshot["steady"]),
        steps=steps_of(snapshot["step_share"]),
        series=series_of(snapshot),
        gantt=gantt_of(snapshot),
        experts=experts_of(snapshot),
        kv=kv_of(state, snapshot["tokens_per_request"]) if state else [],
        handoff=handoff_of(snapshot),
        crossings=crossings_of(snapshot),
        switch=switch_of(snapshot["switch"]),
        quality=remarks_of(snapshot["quality"]),
        notice=snapshot["error"],
    )


def remarks_of(quality: Sequence[dict[str, str]]) -> list[f.Verdict]:
    shown = [v for v in quality if v["severity"] in SHOWN_SEVERITIES and v["code"] not in SAID_ELSEWHERE]
    return [f.Verdict(v["code"], {"warn": "warning", "bad": "error"}[v["severity"]], v["sentence"]) for v in shown]


# ---- the server's own words


def lab_of(state: Snapshot, snapshot: Snapshot) -> f.Lab:
    memory = msgspec.convert(state.get("memory", []), list[MemoryRecord])
    return f.Lab(
        state=state["state"],
        layout=state.get("layout", ""),
        layout_name=state.get("layout_name", ""),
        machine=machine_of(state),
        message=state.get("message", ""),
        restarts_left=state.get("restarts_left", 0),
        failure=_failure(snapshot.get("failure") or state.get("failure")),
        holder=_holder(state["holder"], snapshot) if state.get("holder") else None,
        queue=[_holder(entry, snapshot) for entry in state.get("queue", [])],
        pool_choices=[_choice(entry) for entry in state.get("layouts", []) if entry.get("pools")],
        pools=pools_of(state),
        replicas=[_known(f.Replica, entry) for entry in state.get("replicas", [])],
        memory=memory,
        ownership=ownership_of(state.get("ownership", []), memory),
    )


def machine_of(state: Snapshot) -> f.Machine:
    environment = state.get("environment") or {}
    names = ("backend", "device", "fabric", "dtype", "num_cores", "num_ranks", "threads_per_rank", "model")
    known = {name: state[name] for name in names if name in state}
    return f.Machine(host=environment.get("host", ""), **known)


def _known(kind: type[Any], entry: Snapshot) -> Any:
    """An instance of `kind` from the fields that it knows."""
    return msgspec.convert({name: entry[name] for name in kind.__struct_fields__ if name in entry}, kind)


def _failure(entry: Snapshot | None) -> f.Failure | None:
    return _known(f.Failure, {**entry, "rank": entry.get("rank") or 0}) if entry else None


def _holder(entry: Snapshot, snapshot: Snapshot) -> f.Holder:
    run = snapshot["run"] or {}
    holder: f.Holder = _known(f.Holder, entry)
    holder.is_you = bool(entry.get("run_id")) and entry.get("run_id") == run.get("run_id")
    return holder


def _choice(entry: Snapshot) -> f.PoolChoice:
    choice: f.PoolChoice = _known(f.PoolChoice, entry)
    choice.reason = choice.reason.removeprefix(f"{choice.name} is not allowed: ")
    return choice


def ownership_of(rows: Sequence[Snapshot], memory: Sequence[MemoryRecord]) -> list[f.RankParts]:
    """The KV cache's share is arithmetic, its bytes are what the rank has allocated."""
    kv_bytes = {record.rank: record.kv for record in memory}
    found = []
    for row in rows:
        parts = [_known(f.Part, part) for part in row["parts"]]
        for part in parts:
            if part.part == "kv":
                part.bytes = kv_bytes.get(row["rank"], part.bytes)
        found.append(f.RankParts(row["rank"], row["replica"], parts))
    return found


# ---- this visitor's load


def run_of(snapshot: Snapshot) -> r.Run | None:
    run = snapshot["run"]
    if run is None:
        return None
    settings = (snapshot["state"] or {}).get("settings", {}) | run["settings"]
    return r.Run(
        layout=run["layout"],
        layout_name=name_of(run["layout"]),
        workload=run["workload"],
        rate=run["rate"],
        router=settings.get("router", ""),
        admission=settings.get("admission", ""),
        started_at=_local_time(run["started_at"]),
        num_completed=snapshot["requests"]["completed"],
        num_failed=snapshot["requests"]["failed"],
        ttft_ms=_known(r.Percentiles, snapshot["ttft_ms"]),
        tpot_ms=_known(r.Percentiles, snapshot["tpot_ms"]),
        ttft_parts_ms={PARTS.get(name, name): value for name, value in snapshot["ttft_parts_ms"].items()},
        goodput=_goodput(snapshot["goodput"]),
        **snapshot["throughput"],
    )


def _local_time(iso: str) -> str:
    """14:03:22 of this machine."""
    return datetime.datetime.fromisoformat(iso).astimezone().strftime("%H:%M:%S")


def _goodput(goodput: Snapshot) -> r.Goodput:
    low, high = goodput["attainment_interval"] if goodput["scheduled"] else (None, None)
    return r.Goodput(goodput["requests_per_s"], goodput["attainment"], low, high)


def switch_of(switch: Snapshot | None) -> f.Switch | None:
    if not switch or switch.get("ready_s") is None:
        return None
    layout = str(switch.get("layout", ""))
    return f.Switch(layout, name_of(layout), float(switch["ready_s"]), switch.get("first_token_s"))


def steps_of(share: Snapshot) -> f.StepShares:
    phases = {name: [_known(f.Shares, {"rank": None, **row})] for name, row in share["by_phase"].items()}
    busy = any(row["idle"] < 1 for row in share["by_rank"])
    return f.StepShares(all=[_known(f.Shares, row) for row in share["by_rank"]] if busy else [], **phases)


# ---- the last minute


def series_of(snapshot: Snapshot) -> f.Series:
    """One point a second. Counts per second are smoothed; queue lengths are each second's mean."""
    ages = [float(age) for age in range(SPAN_S, -1, -1)]
    counts = snapshot["series"]
    running, waiting = _queues(snapshot["queues"])
    if snapshot["run"] is None:
        counts = {}
    return f.Series(
        age_s=ages,
        requests_per_s=_smooth(counts.get("requests", [])),
        goodput_per_s=_smooth(counts.get("good", [])),
        input_tokens_per_s=_smooth(counts.get("input_tokens", [])),
        output_tokens_per_s=_smooth(counts.get("output_tokens", [])),
        running=running,
        waiting=waiting,
        marks=[f.Mark(mark["age_s"], name_of(mark["layout"])) for mark in snapshot["marks"]],
    )


def _smooth(counts: Sequence[float]) -> list[float | None]:
    """Means over the last SMOOTH_S seconds, aligned to end now; None where there was no load yet."""
    means = [sum(counts[max(0, i - SMOOTH_S + 1) : i + 1]) / min(i + 1, SMOOTH_S) for i in range(len(counts))]
    shown: list[float | None] = [*means[-SPAN_S - 1 :]]
    return [None] * (SPAN_S + 1 - len(shown)) + shown


def _queues(queues: Snapshot) -> tuple[list[float | None], list[float | None]]:
    """The engine tells its queues only while it is busy: a second without a word is a second without requests."""
    bins: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for age_s, running, waiting in zip(queues["age_s"], queues["running"], queues["waiting"], strict=True):
        bins[int(age_s)].append((running, waiting))
    oldest = max(bins, default=-1)
    columns: tuple[list[float | None], list[float | None]] = ([], [])
    for age in range(SPAN_S, -1, -1):
        for column, values in zip(columns, zip(*bins.get(age, [(0.0, 0.0)]), strict=True), strict=True):
            column.append(None if age > oldest else sum(values) / len(values))
    return columns
