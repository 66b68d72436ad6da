"""Made-up frames, for tests of the drawing alone: nothing here was measured, and nothing of it is shipped.

A frame has to be drawn right whatever is in it: one rank or eight, no samples or many, figures that crowd each other,
long names. The tests that make claims about real figures drive the real lab server instead.
"""

from __future__ import annotations

import math
import random

from labkit.measure.records import MemoryRecord
from labkit.show import frame as f

MIB = 1024**2
REASONS = {
    "tp3": "TP3 does not divide the model's 8 query heads; TP2 and TP4 do.",
    "tp4": "TP4 needs 4 ranks, and this server has 2; start it with --ranks 4.",
    "dp2xtp2": "DP2×TP2 needs 4 ranks, and this server has 2; start it with --ranks 4.",
}


def choices(num_cores: int = 2) -> list[f.LayoutChoice]:
    legal = [("tp1", "TP1", 1), ("tp2", "TP2", 2), ("dp2", "DP2", 2)]
    refused = [("tp3", "TP3", 3), ("tp4", "TP4", 4), ("dp2xtp2", "DP2×TP2", 4)]
    return [f.LayoutChoice(slug, name, True, n, oversubscribed=n > num_cores) for slug, name, n in legal] + [
        f.LayoutChoice(slug, name, False, n, REASONS[slug]) for slug, name, n in refused
    ]


def percentiles(p50: float, spread: float, n: int) -> f.Percentiles:
    firm_from = {"p50": 20, "p90": 100, "p95": 200, "p99": 1000}
    values = {name: p50 * (1 + spread * k) for name, k in zip(firm_from, (0, 1, 1.6, 3.1), strict=True)}
    return f.Percentiles(**values, mean=p50 * 1.1, n=n, few=[name for name, need in firm_from.items() if n < need])


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
        layouts=choices(num_cores),
        replicas=[f.Replica(i % 3, 3, 90 + 11 * i, 256, list(range(i * tp, i * tp + tp))) for i in range(dp)],
        memory=memory(num_ranks, tp),
        ownership=ownership(dp, tp),
    )
    return f.LayoutsFrame(
        link="connected", role="running", workloads=["chat", "long-prompts", "mixed", "shared-prefix"], lab=lab,
        objective=f.Objective(200.0, 12.0), run=run(slug, name, n, p50), steps=shares(num_ranks, tp), series=series(),
        switch=f.Switch(slug, name, 0.18, 0.24),
        quality=[f.Verdict("few_samples", "note", "p99 comes from 240 requests: it is firm from 1000 on.")],
    )  # fmt: skip


def run(slug: str, name: str, n: int, p50: float) -> f.Run:
    weights = {"lateness": 0.01, "network": 0.02, "queue": 0.21, "compute": 0.58, "wait": 0.07, "transfer": 0.05}
    ttft_parts = {part: p50 * share for part, share in weights.items()} | {"delivery": 1.9, "unaccounted": 0.4}
    return f.Run(
        slug, name, "chat", 4.0, "least-work", "labkit", "14:03:22", n, 0,
        ttft_ms=percentiles(p50, 0.42, n), tpot_ms=percentiles(7.4, 0.3, n), ttft_parts_ms=ttft_parts,
        requests_per_s=3.91, input_tokens_per_s=731.0, output_tokens_per_s=238.0,
        goodput=f.Goodput(3.52, 0.902, 0.857, 0.934),
    )  # fmt: skip


def message(made: f.LayoutsFrame, seq: int = 1) -> dict[str, object]:
    return {"type": "frame", "seq": seq, "data": f.to_message(made)}
