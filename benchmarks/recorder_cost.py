"""What watching costs: TPOT with the recorder on against off, turn about, and the processor that telemetry takes.

The recorder: a closed loop of one client (a short step is where the cost shows most). Each round measures on, off or
off, on; the ratio is taken within the round, so that what else the machine does weighs on both alike, and the figure is
the median of the rounds with its 95 % interval (bootstrap). Telemetry: processor time of the server's threads, by the
kernel's own account, while somebody watches the samples against somebody who watches nothing that is sent, turn about;
in cores. Prints the rounds, and one JSON line last.

    python benchmarks/recorder_cost.py [--model lab-30m] [--layout tp2] [--rounds 20] [--seconds 6]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from serving import PAIR, own_lab

from labkit.lab import Lab
from labkit.layout import Layout
from labkit.server.discovery import find

AIM_PERCENT = {"recorder": 2.0, "telemetry": 1.0}


def tpot_ms(lab: Lab, layout: str, record: bool, num_requests: int) -> float:
    run = lab.run(layout, PAIR, num_requests=num_requests, concurrency=1, settings={"record": record})
    return run.summary["tpot_ms"]["p50"]


def recorder_percent(lab: Lab, args: argparse.Namespace) -> list[float]:
    """Of TPOT, round by round."""
    costs = []
    for index in range(args.rounds):
        order = (True, False) if index % 2 == 0 else (False, True)
        seen = {record: tpot_ms(lab, args.layout, record, args.requests) for record in order}
        costs.append(100 * (seen[True] / seen[False] - 1))
        print(f"round {index + 1}: on {seen[True]:.3f} ms, off {seen[False]:.3f} ms, {costs[-1]:+.2f} %", flush=True)
    return costs


def cpu_s(pid: int) -> float:
    """Processor seconds of all threads of a process: to the nanosecond where the kernel keeps count of each."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except (OSError, ValueError, IndexError):
        times = psutil.Process(pid).cpu_times()
        return times.user + times.system


def telemetry_percent(lab: Lab, args: argparse.Namespace) -> list[float]:
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
    return costs


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
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--telemetry-rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement of telemetry")
    args = parser.parse_args()
    figures: dict[str, dict[str, Any]] = {}
    with own_lab(model=args.model, ranks=Layout.parse(args.layout).world_size, memory_per_rank="1GiB") as lab:
        tpot_ms(lab, args.layout, True, args.requests)  # not counted
        for what, measure in (("telemetry", telemetry_percent), ("recorder", recorder_percent)):
            costs = measure(lab, args)
            if costs:
                figures[what] = told(costs, AIM_PERCENT[what])
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    for what, row in figures.items():
        low, high = row["interval_percent"]
        of = "a core" if what == "telemetry" else f"TPOT of {args.layout}"
        print(f"{what}: {row['cost_percent']:+.2f} % of {of} ({low:+.2f} to {high:+.2f}, {row['n']} rounds; "
              f"aim {row['aim_percent']:g} %)")  # fmt: skip
    head = {"benchmark": "recorder_cost", "model": args.model, "layout": args.layout, "load": load}
    print(json.dumps({**head, **figures}))


if __name__ == "__main__":
    main()
