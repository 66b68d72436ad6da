"""Predicted against measured on the machine at hand: calibrated once, then three workloads that it has not seen.

The simulator runs the very schedule that is then sent, with steps that cost what the calibration says; TTFT and TPOT at
p50 and p95 stand beside what the client measured. One rate a workload, for all layouts: the one that keeps a single
rank busy for `--load` of the time, as predicted. `speed` is how long the run's own steps took over what the calibration
says of such steps: a machine that drifts shows there, and the last line says what is left of the errors without it.
Prints the table, and one JSON line last. Runs that were kept (`--keep`) can be looked at again (`--again`); `--docs
FILE` writes the table for a reader.

python benchmarks/predict_here.py [--calibration FILE] [--load 0.6] [--seconds 30] [--keep FOLDER] [--again FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import types
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from serving import own_lab

from labkit.lab import Lab
from labkit.lab.calibrate_plan import calibrate, plan_of
from labkit.lab.calibrate_quiet import Others
from labkit.lab.plan import RunPlan
from labkit.layout import Layout
from labkit.load.schedule import make_schedule
from labkit.load.workload import load_workload
from labkit.measure.metrics import tpot_ms, ttft_ms
from labkit.measure.records import RequestRecord, StepRecord
from labkit.plan.calibration import Calibration, load_calibration
from labkit.plan.calibration_fit import expected
from labkit.plan.fitted_cost import FittedCost
from labkit.plan.shared_cores import simulate_measured
from labkit.plan.sim.request import SimRequest
from labkit.plan.step_samples import samples_of
from labkit.plan.work import EngineSettings
from labkit.server import discovery

LAYOUTS, WORKLOADS = ("tp1", "tp2", "dp2", "pp2"), ("chat", "long-prompts", "mixed")
ALLOWED = {"ttft_p50": 0.10, "tpot_p50": 0.10, "ttft_p95": 0.20, "tpot_p95": 0.20}
KV_BLOCKS = 4096
"""More than these loads ever hold; the engine's own number does not matter as long as nobody waits for room."""
SETTINGS = EngineSettings(policy="labkit", max_num_batched_tokens=512, max_num_seqs=64, enable_prefix_caching=False)
"""What the lab server has by default."""


def requests_of(workload: str, rate: float, seconds: float, options: Any) -> list[SimRequest]:
    """The schedule that will be sent."""
    schedule = make_schedule(
        load_workload(workload), rate=rate, seconds=seconds, seed=options.seed, length_scale=options.scale
    )
    return [SimRequest(request.at_s, len(request.prompt_ids), request.max_tokens) for request in schedule.requests]


def rate_for(cost: FittedCost, workload: str, options: Any) -> float:
    """Requests a second that keep one rank busy for so much of the time, as predicted."""
    low, high = 0.02, 50.0
    for _ in range(12):
        rate = (low * high) ** 0.5
        result = simulate_measured(requests_of(workload, rate, 200 / rate, options), Layout(), cost, KV_BLOCKS,
                                   SETTINGS).result  # fmt: skip
        low, high = (rate, high) if busy_share(result.arrival_s, result.finished_s) < options.load else (low, rate)
    return float(f"{low:.2g}")


def busy_share(arrival_s: np.ndarray, finished_s: np.ndarray) -> float:
    """Of the time until the last arrival, that in which somebody was there."""
    busy = until = 0.0
    for start, end in zip(arrival_s, finished_s, strict=True):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy / arrival_s[-1]


def predict(cost: FittedCost, layout: str, requests: list[SimRequest], skip_s: float) -> dict[str, float]:
    found = simulate_measured(requests, Layout.parse(layout), cost, KV_BLOCKS, SETTINGS)
    counted = np.array([request.arrival_s >= skip_s for request in requests])
    tpots = found.tpot_s[counted]
    return figures(found.ttft_s[counted] * 1e3, tpots[~np.isnan(tpots)] * 1e3)


def speed_of(steps: list[StepRecord], layout: str, cost: FittedCost) -> float:
    """Measured ÷ expected seconds of a run's steps, of each what it had to do and beside whom."""
    samples = samples_of(steps, Layout.parse(layout))
    return sum(sum(each.seconds) for each in samples) / sum(expected(each, cost) for each in samples)


def at_speed(cost: FittedCost, factor: float) -> FittedCost:
    """All steps longer by a factor."""
    stages = tuple(
        replace(stage, alone=tuple(factor * each for each in stage.alone),
                company=tuple(factor * each for each in stage.company))
        for stage in cost.stages
    )  # fmt: skip
    return replace(cost, stages=stages)


def measured(records: list[RequestRecord]) -> dict[str, float]:
    done = [record for record in records if not record.warmup and record.status == "completed"]
    ttfts, tpots = ([value for value in map(of, done) if value is not None] for of in (ttft_ms, tpot_ms))
    return figures(ttfts, tpots)


def figures(ttfts: Sequence[float] | np.ndarray, tpots: Sequence[float] | np.ndarray) -> dict[str, float]:
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
    run = lab.run_plan(plan)
    if options.keep:
        keep(Path(options.keep), layout, workload, rate, options, run)
    return compared(calibration, layout, workload, rate, options, run.records, run.step_records)


def compared(
    calibration: Calibration, layout: str, workload: str, rate: float, options: Any, records: list[RequestRecord],
    steps: list[StepRecord],
) -> dict[str, Any]:  # fmt: skip
    requests, cost = requests_of(workload, rate, options.seconds + options.warmup, options), calibration.cost(layout)
    found, speed = measured(records), speed_of(steps, layout, cost)
    asked, at_own = (predict(each, layout, requests, options.warmup) for each in (cost, at_speed(cost, speed)))
    number = sum(record.status == "completed" and not record.warmup for record in records)
    return {
        "layout": layout,
        "workload": workload,
        "rate": rate,
        "seconds": options.seconds,
        "scale": options.scale,
        "n": number,
        "speed": speed,
        "measured": found,
        "predicted": asked,
        "error": errors(asked, found),
        "error_at_own_speed": errors(at_own, found),
    }


def errors(expected: dict[str, float], found: dict[str, float]) -> dict[str, float]:
    return {name: expected[name] / found[name] - 1 for name in found}


def server_pid() -> int:
    found = discovery.find()
    return found.pid if found else os.getpid()


def keep(folder: Path, layout: str, workload: str, rate: float, options: Any, run: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("seconds", "seed", "warmup", "scale")
    about = {"layout": layout, "workload": workload, "rate": rate, "requests": run.records, "steps": run.step_records,
             **{name: getattr(options, name) for name in names}}  # fmt: skip
    (folder / f"{workload}-{layout}.msgpack").write_bytes(msgspec.msgpack.encode(about))


def looked_at_again(calibration: Calibration, folder: Path) -> list[dict[str, Any]]:
    rows = []
    for path in sorted(folder.glob("*.msgpack")):
        kept = msgspec.msgpack.decode(path.read_bytes())
        records = msgspec.convert(kept["requests"], list[RequestRecord])
        steps = msgspec.convert(kept["steps"], list[StepRecord])
        options = types.SimpleNamespace(**{name: kept[name] for name in ("seed", "scale", "seconds", "warmup")})
        rows.append(compared(calibration, kept["layout"], kept["workload"], kept["rate"], options, records, steps))
        print(line(rows[-1]))
    return rows


def head() -> str:
    columns = "".join(f"{f'{name} ms':>12}{'measured':>9}{'error':>7} " for name in ALLOWED)
    return f"{'workload':<14}{'':<6}{'rate':>5}{'n':>5}{'speed':>7}{columns}"


def line(row: dict[str, Any]) -> str:
    cells = "".join(
        f"{row['predicted'][name]:>12.1f}{row['measured'][name]:>9.1f}{row['error'][name]:>+7.0%}"
        f"{' ' if abs(row['error'][name]) <= allowed else '!'}"
        for name, allowed in ALLOWED.items()
    )
    return f"{row['workload']:<14}{row['layout']:<6}{row['rate']:>5.2g}{row['n']:>5}{row['speed']:>7.2f}{cells}"


def measure(calibration: Calibration, options: Any) -> tuple[list[dict[str, Any]], float]:
    """The rows, and the share of the cores that others had meanwhile."""
    rates = {name: rate_for(calibration.cost("tp1"), name, options) for name in options.workloads}
    rows = []
    with own_lab(model=options.model, ranks=2) as lab:
        meter = Others([os.getpid(), server_pid()])
        for workload in options.workloads:
            for layout in options.layouts:
                rows.append(run_one(lab, calibration, layout, workload, rates[workload], options))
                print(line(rows[-1]), flush=True)
        return rows, meter.share()


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
    parser.add_argument("--again", default="", help="predict the runs kept in this folder instead of sending any")
    parser.add_argument("--docs", default="", help="write the table, as Markdown, to this file")
    parser.add_argument("--anyway", action="store_true", help="although the machine is busy")
    options = parser.parse_args()
    if options.calibration:
        calibration = load_calibration(Path(options.calibration))
    else:
        plan = plan_of(options.model, options.layouts, 2, anyway=options.anyway)
        calibration, _ = calibrate(plan, None, lambda what, share: print(f"{share:4.0%} {what}", file=sys.stderr))
    print(head())
    rows, others = (
        (looked_at_again(calibration, Path(options.again)), None) if options.again else measure(calibration, options)
    )
    told = report(rows, calibration, others)
    if options.docs:
        Path(options.docs).write_text("\n".join(markdown(rows, calibration, told)) + "\n", encoding="utf-8")


def report(rows: list[dict[str, Any]], calibration: Calibration, others: float | None) -> list[str]:
    """The sentences under the table, and the JSON line."""
    found, said = {}, []
    for kind, words in (("error", "as calibrated"), ("error_at_own_speed", "at each run's own speed")):
        within = {name: sum(abs(row[kind][name]) <= allowed for row in rows) for name, allowed in ALLOWED.items()}
        mean = {name: float(np.mean([abs(row[kind][name]) for row in rows])) for name in ALLOWED}
        found[kind] = {"within": within, "mean": mean}
        told = "; ".join(
            f"{name} {within[name]} of {len(rows)} within {allowed:.0%}, {mean[name]:.0%} on average"
            for name, allowed in ALLOWED.items()
        )
        said.append(f"{words[0].upper()}{words[1:]}: {told}.")
    speeds = [row["speed"] for row in rows]
    said.append(f"The runs' own steps took {min(speeds):.2f} to {max(speeds):.2f} of what the calibration says.")
    print("\n".join(said))
    print(json.dumps({"rows": rows, **found, "others_share": others, "calibration": calibration.about}))
    return said


def markdown(rows: list[dict[str, Any]], calibration: Calibration, said: list[str]) -> list[str]:
    about = calibration.about
    machine = f"{about['model']}, {about['num_ranks']} ranks on {about['num_cores']} cores, {about['measured_at'][:10]}"
    lines = [
        "# Predicted against measured on one machine",
        "",
        "Written by `benchmarks/predict_here.py`; do not edit. Steps were measured by `labkit calibrate`, the",
        "workloads were no part of it, and the simulator ran the schedule that was then sent. Milliseconds, predicted",
        "and measured; `speed` is what the run's own steps took over what the calibration says of such steps.",
        "",
        f"{machine}; others had {about['others_share']:.1%} of the cores while it was calibrated. Runs of "
        f"{rows[0]['seconds']:.1f} s, all lengths times {rows[0]['scale']:g}, at one rate a workload.",
        *calibration.notes,
        "",
        f"| workload | layout | requests/s | requests | speed | {' | '.join(ALLOWED).replace('_', ' ')} |",
        "|---|---|---|---|---|" + "---|" * len(ALLOWED),
        *map(table_row, rows),
    ]
    return [*lines, *(line for sentence in said for line in ("", sentence))]


def table_row(row: dict[str, Any]) -> str:
    expected, found, error = row["predicted"], row["measured"], row["error"]
    cells = [f"{expected[name]:.1f} / {found[name]:.1f} ({error[name]:+.0%})" for name in ALLOWED]
    run = [row["workload"], row["layout"], f"{row['rate']:g}", str(row["n"]), f"{row['speed']:.2f}"]
    return f"| {' | '.join([*run, *cells])} |"


if __name__ == "__main__":
    main()
