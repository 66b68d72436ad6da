"""Made-up frames, for tests of the drawing alone: nothing here was measured, and nothing of it is shipped.

A frame has to be drawn right whatever is in it: one rank or eight, no samples or many, figures that crowd each other,
long names. The tests that make claims about real figures drive the real lab server instead.
"""

from __future__ import annotations

import math
import random
from typing import Any

from labkit.layout import choice_table
from labkit.measure.records import MemoryRecord
from labkit.model.spec import load_spec
from labkit.show import frame as f
from labkit.show import frame_axes as a
from labkit.show import frame_run as r

MIB = 1024**2


def choices(model: str = "lab-5m", num_ranks: int = 4, num_cores: int = 2) -> dict[str, Any]:
    """Not made up: the table that a server of this model and so many ranks would send."""
    return choice_table(load_spec(model), num_ranks) | {"ranks_with_own_cores": num_cores}


def percentiles(p50: float, spread: float, n: int) -> r.Percentiles:
    firm_from = {"p50": 20, "p90": 100, "p95": 200, "p99": 1000}
    values = {name: p50 * (1 + spread * k) for name, k in zip(firm_from, (0, 1, 1.6, 3.1), strict=True)}
    return r.Percentiles(**values, mean=p50 * 1.1, n=n, few=[name for name, need in firm_from.items() if n < need])


def parts(num_shards: int, shard: int) -> list[f.Part]:
    split = [("embedding", 8), ("attention", 6), ("mlp", 18), ("kv", 96)]
    found = [f.Part(name, "partitioned", shard, num_shards, int(size * MIB / num_shards)) for name, size in split]
    return [*found[:3], f.Part("norm", "replicated" if num_shards > 1 else "partitioned", 0, 1, 34_816), found[3]]


def ownership(dp: int, tp: int) -> list[f.RankParts]:
    return [f.RankParts(rank, rank // tp, parts(tp, rank % tp)) for rank in range(dp * tp)]


def memory(num_ranks: int, tp: int) -> list[MemoryRecord]:
    weights = int(112 * MIB / tp)
    kv = 96 * MIB
    return [MemoryRecord(rank, weights, kv, 61 * MIB, 256 * MIB - weights - kv) for rank in range(num_ranks)]


def shares(num_ranks: int, tp: int) -> f.StepShares:
    wait, transfer = (0.09, 0.05) if tp > 1 else (0.0, 0.0)

    def rows(busy: float, idle: float) -> list[f.Shares]:
        return [
            f.Shares(r, busy - wait - transfer - 0.01 * r, wait + 0.01 * r, transfer, idle) for r in range(num_ranks)
        ]

    return f.StepShares(all=rows(0.82, 0.18), prefill=rows(1.0, 0.0), decode=rows(1.0, 0.0))


def series(seed: int = 0) -> f.Series:
    rng = random.Random(seed)
    ages = [60.0 - i for i in range(61)]
    wave = [4 + math.sin(age / 7) + rng.random() * 0.6 for age in ages]
    return f.Series(
        age_s=ages,
        requests_per_s=list(wave),
        goodput_per_s=[w * 0.9 for w in wave],
        input_tokens_per_s=[w * 187 for w in wave],
        output_tokens_per_s=[None if 20 < a < 24 else w * 61 for a, w in zip(ages, wave, strict=True)],
        running=[float(round(w)) for w in wave],
        waiting=[float(max(0, round(w - 4))) for w in wave],
        marks=[f.Mark(41.0, "TP1"), f.Mark(22.0, "TP2")],
    )


def frame(dp: int = 1, tp: int = 2, n: int = 240, p50: float = 118.0, num_cores: int = 2) -> f.LayoutsFrame:
    slug = "x".join(part for part in (f"dp{dp}" if dp > 1 else "", f"tp{tp}" if tp > 1 or dp == 1 else "") if part)
    name = slug.upper().replace("X", "×")
    num_ranks = dp * tp
    lab = f.Lab(
        state="ready",
        layout=slug,
        layout_name=name,
        machine=f.Machine("bench", "lab-30m", "cpu", "cpu", "shm", "float32", num_cores, 2, 1),
        restarts_left=3,
        holder=f.Holder("page of Ada", "chat at 4/s", 73, 0, True),
        queue=[f.Holder("shell of Bob", "compare", 12, 90)],
        replicas=[f.Replica(i % 3, 3, 90 + 11 * i, 256, list(range(i * tp, i * tp + tp))) for i in range(dp)],
        memory=memory(num_ranks, tp),
        ownership=ownership(dp, tp),
    )
    return f.LayoutsFrame(
        link="connected", role="running", workloads=["chat", "long-prompts", "mixed", "shared-prefix"], lab=lab,
        objective=f.Objective(200.0, 12.0), run=run(slug, name, n, p50), steps=shares(num_ranks, tp), series=series(),
        kv=kv(dp), crossings=crossings("tp") if tp > 1 else [],
        switch=f.Switch(slug, name, 0.18, 0.24), why=why(), steady=r.Steady(True, 31.0, "", "Steady from 4.0 s on."),
        quality=[f.Verdict("few_samples", "note", "p99 comes from 240 requests: it is firm from 1000 on.")],
    )  # fmt: skip


def run(slug: str, name: str, n: int, p50: float) -> r.Run:
    weights = {"lateness": 0.01, "network": 0.02, "queue": 0.21, "compute": 0.58, "wait": 0.07, "transfer": 0.05}
    ttft_parts = {part: p50 * share for part, share in weights.items()} | {"delivery": 1.9, "unaccounted": 0.4}
    return r.Run(
        slug, name, "chat", 4.0, "least-work", "labkit", "14:03:22", n, 0,
        ttft_ms=percentiles(p50, 0.42, n), tpot_ms=percentiles(7.4, 0.3, n), ttft_parts_ms=ttft_parts,
        requests_per_s=3.91, input_tokens_per_s=731.0, output_tokens_per_s=238.0,
        goodput=r.Goodput(3.52, 0.902, 0.857, 0.934),
    )  # fmt: skip


# ---- single axes


def kv(num_replicas: int, resident: int = 12_345, shared_by: int = 1, role: str = "any") -> list[a.Kv]:
    return [a.Kv(i, role, resident + 900 * i, 45_056, 3, shared_by, 54 - i) for i in range(num_replicas)]


def crossings(*axes: str, scale: float = 1.0) -> list[a.Crossing]:
    found = []
    for i, axis in enumerate(axes):
        for phase, per_s, size in (("prefill", 70.0, 180_000.0), ("decode", 900.0, 4_100.0), ("mixed", 40.0, 60_000.0)):
            rate, num_bytes = per_s * scale / (1 + i), size * (1 + i)
            found.append(a.Crossing(axis, phase, rate, num_bytes, [a.CrossingOp("all_reduce", rate, num_bytes)]))
    return found


def crossings_that_crowd() -> list[a.Crossing]:
    """Five axes that cross alike: their marks lie on each other, and their names must not."""
    return [
        a.Crossing(axis, phase, per_s * (1 + 0.03 * i), size * (1 + 0.05 * i), [a.CrossingOp("sum", per_s, size)])
        for i, axis in enumerate(("tp", "ep", "pp", "pcp", "dcp"))
        for phase, per_s, size in (("prefill", 70.0, 180_000.0), ("decode", 900.0, 4_100.0))
    ]


def gantt(pp: int, num_replicas: int = 1, num_steps: int = 24) -> a.Gantt:
    rows = []
    for replica in range(num_replicas):
        for stage in range(pp):
            first = (replica * pp + stage) * 2
            bars = [[40.0 * i + 12 * stage, 6.0, 20.0, 3.0] for i in range(num_steps)]
            rows.append(a.StageRow(replica, stage, [first, first + 1], bars))
    return a.Gantt(40.0 * num_steps + 12 * pp, rows)


def experts(num_experts: int = 8, num_ranks: int = 2, split: bool = True) -> a.Experts:
    tokens = [1200 + 370 * ((i * 5) % 7) for i in range(num_experts)]
    ranks = [a.ExpertRank(rank, 9000 - 1500 * rank, 3_400_000, 812.0, 95.0 + rank) for rank in range(num_ranks)]
    owners = [[i * num_ranks // num_experts] for i in range(num_experts)] if split else []
    return a.Experts(tokens, ranks, 17, owners)


def every_axis() -> f.LayoutsFrame:
    """More than any one layout has: every panel at once."""
    made = frame(dp=2, tp=2)
    made.lab.layout, made.lab.layout_name = "prefill:pp2xtp2,decode:tp2", "prefill:PP2×TP2, decode:TP2"
    made.lab.pools = [
        a.PoolInfo("prefill", "pp2xtp2", "PP2×TP2", [0, 1, 2, 3], 3, 2, 9_000, 45_056),
        a.PoolInfo("decode", "tp2", "TP2", [4, 5], 0, 12, 30_000, 45_056),
    ]
    made.lab.pool_choices = [
        f.PoolChoice("prefill:tp1,decode:tp1", "prefill:TP1, decode:TP1", True, 2),
        f.PoolChoice("prefill:tp3,decode:tp1", "prefill:TP3, decode:TP1", False, 4, "8 query heads ÷ tp 3 = 2.67…"),
    ]
    made.handoff = a.Handoff(214, 1_300_000, 4.2, 9.9, 310.0)
    made.kv = [*kv(1, role="prefill"), *kv(1, shared_by=2, role="decode")]
    made.kv[1].replica = 1
    made.gantt, made.experts = gantt(2), experts()
    made.crossings = crossings("tp", "pp", "pcp", "dcp", "ep")
    made.run.ttft_parts_ms["handoff"] = 4.2
    return made


# ---- what is held against it


def stored() -> list[dict[str, Any]]:
    """Not what a store would have at once: a run of ours, of a started engine, and two files."""
    kinds = [("TP2", "labkit", "tp2"), ("DP2×TP2 on vLLM", "vLLM 0.12.0", "dp2xtp2"),
             ("TP2, vLLM's bench serve", "", "tp2"), ("aiperf", "", "")]  # fmt: skip
    return [
        {"run_id": f"run-{i}", "name": name, "layout": layout, "engine": engine, "model": "lab-30m",
         "workload": "chat" if engine else "a-result-file-of-some-length.json", "rate": 4.0 if layout else None,
         "concurrency": None, "started_at": f"2026-01-0{i + 1}T09:30:00", "n": 240 * (i + 1)}
        for i, (name, engine, layout) in enumerate(kinds)
    ]  # fmt: skip


def difference(figure: str, q: int, change: float | None, spread: float, then: float) -> r.Difference:
    low, high = (None, None) if change is None else (change - spread, change + spread)
    verdict = "too few" if low is None else "less" if high < 0 else "more" if low > 0 else "cannot tell"
    return r.Difference(figure, q, change, low, high, then, 240, 90, q > 90, verdict)


def beside(run_id: str = "run-1") -> r.Beside:
    ghost = run("dp2xtp2", "DP2×TP2 on vLLM", 480, 96.0)
    ghost.ttft_parts_ms = dict.fromkeys(ghost.ttft_parts_ms)
    rows = [("engine", "labkit", "vLLM 0.12.0", False), ("model", "lab-30m", "lab-30m", True),
            ("workload", "chat", "", None), ("rate", "4/s", "8 in flight", False), ("layout", "tp2", "dp2xtp2", False),
            ("machine", "bench, cpu, 2 cores", "a-node-with-a-long-name.cluster.example, H200, 16 cores", False),
            ("dtype", "float32", "float32", True)]  # fmt: skip
    changes = [
        difference("ttft_ms", 50, 21.0, 8.0, 96.0), difference("ttft_ms", 90, 4.0, 30.0, 140.0),
        difference("ttft_ms", 95, -40.0, 35.0, 190.0), difference("tpot_ms", 50, -0.6, 0.2, 8.0),
        difference("tpot_ms", 90, 0.1, 0.6, 9.0), difference("tpot_ms", 95, None, 0.0, 9.5),
    ]  # fmt: skip
    return r.Beside(
        run_id, ghost, "2026-01-02 09:30", "vLLM", conditions=[r.Condition(*row) for row in rows],
        missing=["parts", "memory", "steps"], differences=changes,
        remarks=["Measured by vllm bench serve and read from theirs.json; its TTFT counts from the send."],
    )  # fmt: skip


def why(scale: float = 1.0) -> r.Why:
    ttft = {"lateness": 0.4, "network": 1.1, "queue": 40.0, "compute": 52.0, "wait": 9.0, "transfer": 6.0,
            "handoff": 0.0, "delivery": 1.9, "unaccounted": 0.3}  # fmt: skip
    tpot = {"queue": 0.8, "compute": 5.1, "wait": 0.9, "transfer": 0.5, "handoff": 0.0, "delivery": -0.1,
            "unaccounted": 0.01}  # fmt: skip
    falls, reasons = [], []
    for figure, parts in (("ttft", ttft), ("tpot", tpot)):
        for q in (50, 95):
            times = scale * (1.0 if q == 50 else 3.2)
            scaled = {name: value * times for name, value in parts.items()}
            falls.append(r.Waterfall(figure, q, scaled, sum(scaled.values()), 240, q == 95))
            kind = "cannot tell" if q == 95 else "queue-bound" if figure == "ttft" else "bandwidth-bound"
            sentence = "Of 110.7 ms: queue 36%, compute 47%. It waits for 3.1 steps; the ranks are idle 12%."
            reasons.append(r.Reason(figure, q, kind, sentence))
    return r.Why(falls, reasons)


def message(made: f.LayoutsFrame, seq: int = 1) -> dict[str, object]:
    return {"type": "frame", "seq": seq, "data": f.to_message(made)}
