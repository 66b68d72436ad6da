"""Predicted against measured on the machine at hand: calibrated once, then three workloads that it has not seen.

The simulator runs the very schedule that is then sent, with steps that cost what the calibration says; TTFT and TPOT at
p50 and p95 stand beside what the client measured. One rate a workload, for all layouts: the one that keeps a single
rank busy for `--load` of the time, as predicted. `speed` is how long the runs' own steps took over what the calibration
says of such steps: a machine that drifts shows there, and the last line says what is left of the errors without it.
Prints the table, and one JSON line last. Runs that were kept (`--keep`) can be looked at again (`--again`); `--docs
FILE` writes the table for a reader.

    python benchmarks/predict_here.py [--calibration FILE] [--load 0.6] [--seconds 30] [--rounds 3]
        [--keep FOLDER] [--again FOLDER]
"""

from __future__ import annotations

import argparse
import os
import sys
import types
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from predict_here_table import head, line, markdown, report
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
from labkit.plan.step_samples import Sample, samples_of
from labkit.plan.work import EngineSettings
from labkit.server import discovery

LAYOUTS, WORKLOADS = ("tp1", "tp2", "dp2", "pp2"), ("chat", "long-prompts", "mixed")
KV_BLOCKS = 4096
"""More than these loads ever hold; the engine's own number does not matter as long as nobody waits for room."""
SETTINGS = EngineSettings(policy="labkit", max_num_batched_tokens=512, max_num_seqs=64, enable_prefix_caching=False)
"""What the lab server has by default."""


def requests_of(workload: str, rate: float, seconds: float, seed: int, scale: float) -> list[SimRequest]:
    """The schedule that will be sent."""
    schedule = make_schedule(load_workload(workload), rate=rate, seconds=seconds, seed=seed, length_scale=scale)
    return [SimRequest(request.at_s, len(request.prompt_ids), request.max_tokens) for request in schedule.requests]


def rate_for(cost: FittedCost, workload: str, options: Any) -> float:
    """Requests a second that keep one rank busy for so much of the time, as predicted."""
    low, high = 0.02, 50.0
    for _ in range(12):
        rate = (low * high) ** 0.5
        result = simulate_measured(requests_of(workload, rate, 200 / rate, options.seed, options.scale), Layout(), cost,
                                   KV_BLOCKS, SETTINGS).result  # fmt: skip
        low, high = (rate, high) if busy_share(result.arrival_s, result.finished_s) < options.load else (low, rate)
    return float(f"{low:.2g}")


def busy_share(arrival_s: np.ndarray, finished_s: np.ndarray) -> float:
    """Of the time until the last arrival, that in which somebody was there."""
    busy = until = 0.0
    for start, end in zip(arrival_s, finished_s, strict=True):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy / arrival_s[-1]


def predict(cost: FittedCost, layout: str, schedules: list[list[SimRequest]], skip_s: float) -> dict[str, float]:
    """Over all schedules' requests together, each schedule simulated from an idle engine."""
    ttfts, tpots = [], []
    for requests in schedules:
        found = simulate_measured(requests, Layout.parse(layout), cost, KV_BLOCKS, SETTINGS)
        counted = np.array([request.arrival_s >= skip_s for request in requests])
        ttfts.append(found.ttft_s[counted])
        tpots.append(found.tpot_s[counted])
    tpot = np.concatenate(tpots)
    return figures(np.concatenate(ttfts) * 1e3, tpot[~np.isnan(tpot)] * 1e3)


def speed_of(samples: list[Sample], cost: FittedCost) -> float:
    """Measured ÷ expected seconds of steps, of each what it had to do and beside whom."""
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


class Turn(NamedTuple):
    """One run of a workload on a layout: the schedule's seed, and what came of it."""

    seed: int
    requests: list[RequestRecord]
    steps: list[StepRecord]


def run_one(lab: Lab, layout: str, workload: str, rate: float, seed: int, options: Any) -> Turn:
    plan = RunPlan(
        layout=Layout.parse(layout), workload=workload, rate=rate, seconds=options.seconds, warmup_s=options.warmup,
        seed=seed, length_scale=options.scale,
    )  # fmt: skip
    run = lab.run_plan(plan)
    return Turn(seed, run.records, run.step_records)


def compared(
    calibration: Calibration, layout: str, workload: str, rate: float, options: Any, turns: list[Turn]
) -> dict[str, Any]:
    """A row: all turns' requests together, predicted and measured."""
    cost = calibration.cost(layout)
    schedules = [
        requests_of(workload, rate, options.seconds + options.warmup, turn.seed, options.scale) for turn in turns
    ]
    samples = [samples_of(turn.steps, Layout.parse(layout)) for turn in turns]
    speeds = [speed_of(each, cost) for each in samples]
    speed = speed_of([sample for each in samples for sample in each], cost)
    found = measured([record for turn in turns for record in turn.requests])
    asked, at_own = (predict(each, layout, schedules, options.warmup) for each in (cost, at_speed(cost, speed)))
    return {
        "layout": layout,
        "workload": workload,
        "rate": rate,
        "seconds": options.seconds,
        "scale": options.scale,
        "n": sum(record.status == "completed" and not record.warmup for turn in turns for record in turn.requests),
        "speed": speed,
        "speeds": speeds,
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


def keep(folder: Path, layout: str, workload: str, rate: float, options: Any, turn: Turn) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("seconds", "warmup", "scale")
    about = {"layout": layout, "workload": workload, "rate": rate, **turn._asdict(),
             **{name: getattr(options, name) for name in names}}  # fmt: skip
    (folder / f"{workload}-{layout}-{turn.seed}.msgpack").write_bytes(msgspec.msgpack.encode(about))


def looked_at_again(calibration: Calibration, folder: Path) -> list[dict[str, Any]]:
    kept: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.msgpack")):
        one = msgspec.msgpack.decode(path.read_bytes())
        kept.setdefault((one["workload"], one["layout"]), []).append(one)
    rows = []
    for (workload, layout), ones in kept.items():
        turns = [
            Turn(one["seed"], msgspec.convert(one["requests"], list[RequestRecord]),
                 msgspec.convert(one["steps"], list[StepRecord])) for one in ones
        ]  # fmt: skip
        options = types.SimpleNamespace(**{name: ones[0][name] for name in ("scale", "seconds", "warmup")})
        rows.append(compared(calibration, layout, workload, ones[0]["rate"], options, turns))
        print(line(rows[-1]))
    return rows


def measure(calibration: Calibration, options: Any) -> tuple[list[dict[str, Any]], float]:
    """The rows, and the share of the cores that others had meanwhile. Each round runs every workload on every layout
    once, there or back, so that a machine that drifts does it to all of them.
    """
    rates = {name: rate_for(calibration.cost("tp1"), name, options) for name in options.workloads}
    turns: dict[tuple[str, str], list[Turn]] = {(w, one): [] for w in options.workloads for one in options.layouts}
    with own_lab(model=options.model, ranks=2) as lab:
        meter = Others([os.getpid(), server_pid()])
        for turn in range(options.rounds):
            there_and_back = reversed(turns.items()) if turn % 2 else turns.items()
            for (workload, layout), so_far in there_and_back:
                run = run_one(lab, layout, workload, rates[workload], options.seed + turn, options)
                so_far.append(run)
                if options.keep:
                    keep(Path(options.keep), layout, workload, rates[workload], options, run)
                alone = compared(calibration, layout, workload, rates[workload], options, [run])
                print(line(alone), file=sys.stderr, flush=True)
        others = meter.share()
    rows = [compared(calibration, layout, workload, rates[workload], options, found)
            for (workload, layout), found in turns.items()]  # fmt: skip
    print("\n".join(map(line, rows)))
    return rows, others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lab-30m")
    parser.add_argument("--calibration", default="", help="a file; else this machine is calibrated now")
    parser.add_argument("--load", type=float, default=0.6)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=3, help="of all runs, each round with arrivals of its own")
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


if __name__ == "__main__":
    main()
