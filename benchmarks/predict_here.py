"""Predicted against measured on the machine at hand: calibrated once, then three workloads that it has not seen.

The engine's own schedulers run the very schedule that is then sent, with steps that cost what the calibration says;
TTFT and TPOT at p50 and p95 stand beside what the client measured. One rate a workload, for all layouts: the one that
keeps a single rank busy for `--load` of the time, as predicted. Prints the table, and one JSON line last.

python benchmarks/predict_here.py [--calibration FILE] [--load 0.6] [--seconds 30] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from serving import own_lab
from shared_loop import SharedLoop

from labkit.lab import Lab
from labkit.lab.calibrate_plan import calibrate, plan_of
from labkit.lab.calibrate_quiet import Others
from labkit.lab.plan import RunPlan
from labkit.layout import Layout
from labkit.load.schedule import make_schedule
from labkit.load.workload import load_workload
from labkit.measure.metrics import tpot_ms, ttft_ms
from labkit.measure.records import RequestRecord
from labkit.plan.calibration import Calibration, load_calibration
from labkit.server import discovery

LAYOUTS, WORKLOADS = ("tp1", "tp2", "dp2", "pp2"), ("chat", "long-prompts", "mixed")
ALLOWED = {"ttft_p50": 0.10, "tpot_p50": 0.10, "ttft_p95": 0.20, "tpot_p95": 0.20}
KV_BLOCKS = 4096
"""More than these loads ever hold; the engine's own number does not matter as long as nobody waits for room."""
Arrivals = list[tuple[float, int, int]]


def arrivals_of(workload: str, rate: float, seconds: float, options: Any) -> Arrivals:
    """The schedule that will be sent: (at, prompt tokens, answer tokens)."""
    schedule = make_schedule(
        load_workload(workload), rate=rate, seconds=seconds, seed=options.seed, length_scale=options.scale
    )
    return [(request.at_s, len(request.prompt_ids), request.max_tokens) for request in schedule.requests]


def rate_for(calibration: Calibration, workload: str, options: Any) -> float:
    """Requests a second that keep one rank busy for so much of the time, as predicted."""
    low, high = 0.02, 50.0
    for _ in range(12):
        rate = (low * high) ** 0.5
        loop = SharedLoop(Layout(), calibration.cost("tp1"), KV_BLOCKS)
        arrivals = arrivals_of(workload, rate, 80 / rate, options)
        loop.run(arrivals)
        low, high = (rate, high) if loop.busy_s / arrivals[-1][0] < options.load else (low, rate)
    return float(f"{low:.2g}")


def predict(calibration: Calibration, layout: str, arrivals: Arrivals, skip_s: float) -> dict[str, float]:
    cost = calibration.cost(layout)
    ttft, tpot = SharedLoop(Layout.parse(layout), cost, KV_BLOCKS).run(arrivals)
    counted = [i for i, (at, _, _) in enumerate(arrivals) if at >= skip_s]
    ttfts = [cost.client.ttft_s(ttft[i], arrivals[i][1]) * 1e3 for i in counted]
    tpots = [cost.client.tpot_s(tpot[i], arrivals[i][2]) * 1e3 for i in counted if arrivals[i][2] > 1]
    return figures(ttfts, tpots)


def measured(records: list[RequestRecord]) -> dict[str, float]:
    done = [record for record in records if not record.warmup and record.status == "completed"]
    ttfts, tpots = ([value for value in map(of, done) if value is not None] for of in (ttft_ms, tpot_ms))
    return figures(ttfts, tpots)


def figures(ttfts: list[float], tpots: list[float]) -> dict[str, float]:
    return {
        f"{name}_{label}": float(np.percentile(values, q))
        for name, values in (("ttft", ttfts), ("tpot", tpots))
        for label, q in (("p50", 50), ("p95", 95))
    }


def run_one(
    lab: Lab, calibration: Calibration, layout: str, workload: str, rate: float, options: Any
) -> dict[str, Any]:
    plan = RunPlan(
        layout=Layout.parse(layout), workload=workload, rate=rate, seconds=options.seconds, warmup_s=options.warmup,
        seed=options.seed, length_scale=options.scale,
    )  # fmt: skip
    arrivals = arrivals_of(workload, rate, options.seconds + options.warmup, options)
    expected = predict(calibration, layout, arrivals, options.warmup)
    run = lab.run_plan(plan)
    found = measured(run.records)
    if options.keep:
        keep(Path(options.keep), layout, workload, rate, options, run)
    return {"layout": layout, "workload": workload, "rate": rate, "n": run.summary["requests"]["completed"],
            "predicted": expected, "measured": found, "error": errors(expected, found)}  # fmt: skip


def errors(expected: dict[str, float], found: dict[str, float]) -> dict[str, float]:
    return {name: expected[name] / found[name] - 1 for name in found}


def server_pid() -> int:
    found = discovery.find()
    return found.pid if found else os.getpid()


def keep(folder: Path, layout: str, workload: str, rate: float, options: Any, run: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    about = {"layout": layout, "workload": workload, "rate": rate, "seconds": options.seconds, "seed": options.seed,
             "warmup": options.warmup, "scale": options.scale, "requests": run.records, "steps": run.step_records}  # fmt: skip
    (folder / f"{workload}-{layout}.msgpack").write_bytes(msgspec.msgpack.encode(about))


def line(row: dict[str, Any]) -> str:
    cells = "".join(
        f"{row['predicted'][name]:>10.1f}{row['measured'][name]:>9.1f}{row['error'][name]:>+7.0%}"
        f"{' ' if abs(row['error'][name]) <= allowed else '!'}"
        for name, allowed in ALLOWED.items()
    )
    return f"{row['workload']:<14}{row['layout']:<6}{row['rate']:>5.2g}{row['n']:>5}{cells}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lab-30m")
    parser.add_argument("--calibration", default="", help="a file; else this machine is calibrated now")
    parser.add_argument("--load", type=float, default=0.6)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--warmup", type=float, default=2.0)
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths: shorter ones make more requests")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS))
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--keep", default="", help="write requests and steps of every run into this folder")
    parser.add_argument("--anyway", action="store_true", help="although the machine is busy")
    options = parser.parse_args()
    if options.calibration:
        calibration = load_calibration(Path(options.calibration))
    else:
        plan = plan_of(options.model, options.layouts, 2, anyway=options.anyway)
        calibration, _ = calibrate(plan, None, lambda what, share: print(f"{share:4.0%} {what}", file=sys.stderr))
    rates = {name: rate_for(calibration, name, options) for name in options.workloads}
    columns = "".join(f"{f'{name} ms':>10}{'measured':>9}{'error':>7} " for name in ALLOWED)
    print(f"{'workload':<14}{'':<6}{'rate':>5}{'n':>5}{columns}")
    with own_lab(model=options.model, ranks=2) as lab:
        meter, rows = Others([os.getpid(), server_pid()]), []
        for layout in options.layouts:
            for workload in options.workloads:
                rows.append(run_one(lab, calibration, layout, workload, rates[workload], options))
                print(line(rows[-1]), flush=True)
        others = meter.share()
    report(rows, calibration, others)


def report(rows: list[dict[str, Any]], calibration: Calibration, others: float) -> None:
    within = {name: sum(abs(row["error"][name]) <= allowed for row in rows) for name, allowed in ALLOWED.items()}
    mean = {name: float(np.mean([abs(row["error"][name]) for row in rows])) for name in ALLOWED}
    told = "; ".join(
        f"{name} {within[name]} of {len(rows)} within {allowed:.0%}, mean error {mean[name]:.0%}"
        for name, allowed in ALLOWED.items()
    )
    print(told + ".")
    print(json.dumps({"rows": rows, "within": within, "mean_error": mean, "others_share": others,
                      "calibration": calibration.about}))  # fmt: skip


if __name__ == "__main__":
    main()
