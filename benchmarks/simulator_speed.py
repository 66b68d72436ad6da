"""How many requests a second the simulator takes, on one core: Llama-3.1-70B at TP4 under production chat.

Prints requests per second of processor time at several rates, then whether time is linear in requests and in replicas
(four times as many of each), then a million requests over 256 replicas. The figure to beat is vidur's: 470 requests a
second of the same kind of load on the machine where it was measured. The machine's load stands beside every figure:
what else runs on it makes a core slower.

    python benchmarks/simulator_speed.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable

import numpy as np

from labkit.layout import Layout
from labkit.model.spec import load_spec
from labkit.plan.cost import step_cost
from labkit.plan.hardware import load_hardware
from labkit.plan.memory import memory_plan
from labkit.plan.simulate import SimRequest, simulate
from labkit.plan.work import EngineSettings

PEER_PER_S = 470
NEEDED_PER_S, AIM_PER_S = 5_000, 20_000
MILLION_LIMIT_S = 180
SETTINGS = EngineSettings()


def chat(count: int, rate: float, seed: int = 0) -> list[SimRequest]:
    """Medians of about 1,000 tokens in and 130 out, as published for one chat service in 2023, Poisson arrivals."""
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    prompt = np.clip(rng.lognormal(np.log(1000), 0.6, count), 16, 6000).astype(int).tolist()
    output = np.clip(rng.lognormal(np.log(130), 0.6, count), 4, 1000).astype(int).tolist()
    return [SimRequest(*each) for each in zip(at, prompt, output, strict=True)]


def replica(num_replicas: int = 1) -> Callable[[list[SimRequest]], float]:
    """Simulates on so many replicas of four H100; returns seconds of processor time."""
    spec, hardware, one = load_spec("llama-3.1-70b"), load_hardware("4xh100"), Layout(tp=4)
    cost = step_cost(one, spec, hardware, SETTINGS)
    blocks = memory_plan(one, spec, hardware.device.memory_bytes, SETTINGS).kv_blocks
    layout = Layout(dp=num_replicas, tp=4)

    def run(requests: list[SimRequest]) -> float:
        began = time.process_time()
        result = simulate(requests, layout, cost, blocks, SETTINGS)
        assert result.done.all()
        return time.process_time() - began

    return run


def report(name: str, count: int, seconds: float, told: dict[str, float]) -> float:
    rate = count / seconds
    told[name] = rate
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{name:<42} {count:>9,} requests {seconds:8.2f} s {rate:9,.0f} requests/s   load {os.getloadavg()[0]:.1f}, "
        f"{memory_mb:,.0f} MB",
        flush=True,
    )
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="without the million")
    parser.add_argument("--json", action="store_true", help="a JSON line last")
    options = parser.parse_args()
    told: dict[str, float] = {}
    one = replica()
    one(chat(500, 3.0))
    rates = []
    for rate in (1.0, 3.0, 6.0):
        rates.append(report(f"one replica at {rate:g} requests/s", 20_000, one(chat(20_000, rate)), told))
    times = min(rates) / PEER_PER_S
    print(f"  needed {NEEDED_PER_S:,}, aimed at {AIM_PER_S:,}; {times:.0f} × the peer's {PEER_PER_S} at least")
    longer = report("four times the requests", 80_000, one(chat(80_000, 3.0)), told)
    print(f"  time grew by {4 * rates[1] / longer:.2f} for 4 ×")
    few = report("16 replicas", 40_000, replica(16)(chat(40_000, 48.0)), told)
    many = report("64 replicas, four times the requests", 160_000, replica(64)(chat(160_000, 192.0)), told)
    print(f"  time grew by {4 * few / many:.2f} for 4 × replicas and requests")
    if not options.quick:
        requests = chat(1_000_000, 768.0)
        many_replicas, began = replica(256), time.perf_counter()
        seconds = many_replicas(requests)
        wall_s = time.perf_counter() - began
        report("a million over 256 replicas", 1_000_000, seconds, told)
        told["a million: seconds by the clock"] = wall_s
        within = "within" if wall_s <= MILLION_LIMIT_S else "NOT within"
        print(f"  {wall_s:.0f} s by the clock, {within} the {MILLION_LIMIT_S} s allowed")
    if options.json:
        print(json.dumps(told))


if __name__ == "__main__":
    main()
