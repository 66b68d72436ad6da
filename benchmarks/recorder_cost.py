"""What watching costs: TPOT with the recorder on against off, turn about, and the processor that telemetry takes.

The recorder: one client's long answers (a short step is where the cost shows most), in which the ranks' recording is
switched every fraction of a second. Neighbouring blocks with and without rows make a pair, so that what else the
machine does weighs on both alike; the figure is the median of the pairs with its 95 % interval (bootstrap): by the
blocks' medians, and by their quickest fifths, which other processes disturb least. Telemetry: processor time of the
server's threads, by the kernel's own account, while somebody watches the samples against somebody who watches nothing
that is sent, turn about; in cores. Prints one JSON line last.

    python benchmarks/recorder_cost.py [--model lab-30m] [--layout tp2] [--requests 6] [--block-s 0.4]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import psutil
from serving import PAIR, own_lab

from labkit.lab import Lab
from labkit.layout import Layout
from labkit.load.lengths import Lengths
from labkit.load.workload import Part, Workload
from labkit.measure.records import StepRecord
from labkit.server.discovery import find

AIM_PERCENT = {"recorder": 2.0, "telemetry": 1.0}
MIN_STEPS = 8
"""Of a block, for its median to count."""


def recorder_percent(lab: Lab, args: argparse.Namespace) -> dict[str, list[float]]:
    """Of a decode step's time, pair by pair: one client's long answers, while the recorder is switched all the time."""
    part = Part(Lengths("constant", tokens=128), Lengths("constant", tokens=args.tokens))
    workload, ranks, over = Workload("long", "128 tokens in, a long answer out", (part,)), range(args.ranks), Event()

    def switch() -> None:
        for kind in itertools.cycle(("mute", "unmute", "unmute", "mute")):  # off on on off: no drift favours either
            if over.wait(args.block_s):
                return
            for rank in ranks:
                lab.client.fault(rank, kind)

    switching = Thread(target=switch)
    switching.start()
    try:
        run = lab.run(args.layout, workload, num_requests=args.requests, concurrency=1)
    finally:
        over.set()
        switching.join()
        for rank in ranks:
            lab.client.fault(rank, "unmute")
    steps = [step for step in run.step_records if not step.num_prefill_seqs]
    return {"recorder": paired(steps, 50), "recorder, quickest steps": paired(steps, 20)}


def paired(steps: list[StepRecord], percentile: int) -> list[float]:
    """Percent that a step takes longer in a block with rows than in the neighbouring block without.

    A step lasts from the one before it to its own end, so all that the engine does between two counts. The first two of
    a block, in which the ranks may still differ, do not.
    """
    blocks: list[tuple[bool, list[int]]] = []
    for before, step in itertools.pairwise(steps):
        is_on = step.num_collectives > 0
        if not blocks or blocks[-1][0] != is_on:
            blocks.append((is_on, []))
        if step.step_id == before.step_id + 1:
            blocks[-1][1].append(step.end_ns - before.end_ns)
    told = [(is_on, float(np.percentile(took[2:], percentile))) for is_on, took in blocks if len(took) >= MIN_STEPS]
    pairs = [(a[1], b[1]) if a[0] else (b[1], a[1]) for a, b in zip(told[::2], told[1::2], strict=False)]
    return [100 * (on / off - 1) for on, off in pairs]


def cpu_s(pid: int) -> float:
    """Processor seconds of all threads of a process: to the nanosecond where the kernel keeps count of each."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except (OSError, ValueError, IndexError):
        times = psutil.Process(pid).cpu_times()
        return times.user + times.system


def telemetry_percent(lab: Lab, args: argparse.Namespace) -> dict[str, list[float]]:
    """Of a core, round by round."""
    found, costs = find(), []
    assert found is not None
    for _ in range(args.telemetry_rounds):
        spent = {}
        for kind in ("telemetry", "lease"):
            told: list[Any] = []
            with lab.client.events(told.append, (kind,)):
                time.sleep(1.0)
                before, began, told[:] = cpu_s(found.pid), time.monotonic(), []
                time.sleep(args.seconds)
                spent[kind] = (cpu_s(found.pid) - before) / (time.monotonic() - began)
            assert kind == "lease" or len(told) > 2 * args.seconds, "no samples came"
        costs.append(100 * (spent["telemetry"] - spent["lease"]))
        with_it, without = (100 * spent[kind] for kind in ("telemetry", "lease"))
        print(f"telemetry: {with_it:.2f} % of a core, without {without:.2f} %", flush=True)
    return {"telemetry": costs}


def told(costs: list[float], aim: float) -> dict[str, Any]:
    """Median and its 95 % interval."""
    draws = np.random.default_rng(0).choice(costs, (4000, len(costs)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5]).tolist()
    return {"cost_percent": statistics.median(costs), "interval_percent": [low, high], "n": len(costs),
            "aim_percent": aim}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lab-30m")
    parser.add_argument("--layout", default="tp2")
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=1500, help="of each answer")
    parser.add_argument("--block-s", type=float, default=0.4, help="between two switches")
    parser.add_argument("--telemetry-rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement of telemetry")
    args = parser.parse_args()
    args.ranks = Layout.parse(args.layout).world_size
    figures: dict[str, dict[str, Any]] = {}
    with own_lab(model=args.model, ranks=args.ranks, memory_per_rank="1GiB") as lab:
        lab.run(args.layout, PAIR, num_requests=4, concurrency=1)  # not counted
        for measure in (telemetry_percent, recorder_percent):
            for what, costs in measure(lab, args).items():
                if costs:
                    figures[what] = told(costs, AIM_PERCENT[what.split(",")[0]])
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    for what, row in figures.items():
        low, high = row["interval_percent"]
        of = "a core" if what == "telemetry" else f"TPOT of {args.layout}"
        print(f"{what}: {row['cost_percent']:+.2f} % of {of} ({low:+.2f} to {high:+.2f}, {row['n']} pairs; "
              f"aim {row['aim_percent']:g} %)")  # fmt: skip
    head = {"benchmark": "recorder_cost", "model": args.model, "layout": args.layout, "load": load}
    print(json.dumps({**head, **figures}))


if __name__ == "__main__":
    main()
