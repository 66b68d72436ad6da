"""`labkit bench collectives` against a plain timed loop over torch.distributed, turn about: do the figures agree?

The loop is what one would write by hand, and knows nothing of labkit: two processes, a group of gloo, meet, call, note
the time; of each round the slower rank, of all rounds the quickest and the median. Each turn measures one after the
other, with processes started anew, and the ratio is taken within the turn. The interval of the median ratio is a
bootstrap over turns: they agree when it holds 1, or the ratio is within a twentieth of it. On a machine with other work
the medians are that work's, and the quickest rounds are compared. Prints the turns, and one JSON line last.

    python benchmarks/bench_agrees.py [--turns 12] [--rounds 60] [--sizes 65536,1048576,4194304]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from typing import Any

import numpy as np

OPS = ("all_reduce", "all_gather")
FLOOR = 0.05
"""No two ways to take a time agree better than this on a machine with other processes."""
STATISTICS = ("min_us", "time_us")
Key = tuple[str, int, str]
"""Operation, bytes of the whole buffer, statistic."""


def plain_loop(sizes: list[int], num_rounds: int) -> dict[Key, float]:
    """Microseconds."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = spawn.Queue()
        arguments = [(rank, f"file://{folder}/store", sizes, num_rounds, results) for rank in (0, 1)]
        ranks = [spawn.Process(target=_rank, args=each) for each in arguments]
        for rank in ranks:
            rank.start()
        told = dict(results.get(timeout=120) for _ in ranks)
        for rank in ranks:
            rank.join()
    found = {}
    for op, size in told[0]:
        took = np.maximum(told[0][op, size], told[1][op, size]) / 1e3
        found |= {(op, size, "min_us"): float(took.min()), (op, size, "time_us"): float(np.median(took))}
    return found


def _rank(rank: int, store: str, sizes: list[int], num_rounds: int, results: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    times: dict[tuple[str, int], list[int]] = {}
    for size in sizes:
        whole, half = torch.ones(size // 4), torch.ones(size // 8)

        def gather(half: Any = half) -> Any:
            whole = torch.empty(2 * half.numel())
            dist.all_gather_into_tensor(whole, half)
            return whole

        for op, call in (("all_reduce", lambda whole=whole: dist.all_reduce(whole)), ("all_gather", gather)):
            took = times[op, size] = []
            for _ in range(num_rounds + 5):
                dist.barrier()
                began = time.monotonic_ns()
                call()
                took.append(time.monotonic_ns() - began)
            del took[:5]
    results.put((rank, times))
    dist.destroy_process_group()


def benched(sizes: list[int], num_rounds: int) -> dict[Key, float]:
    from labkit.lab.bench import BenchPlan, measure
    from labkit.layout import Layout

    plan = BenchPlan(Layout(tp=2), ops=OPS, fabric="gloo", num_bytes=tuple(sizes), num_warmup=5, num_rounds=num_rounds)
    rows = asyncio.run(measure(plan))
    wanted = {"all_reduce": True, "all_gather": False}
    mine = [row for row in rows if row["in_place"] == wanted[row["op"]]]
    return {(row["op"], row["bytes"], statistic): row[statistic] for row in mine for statistic in STATISTICS}


def compare(ours: list[dict[Key, float]], loops: list[dict[Key, float]]) -> list[dict[str, Any]]:
    """A row for each operation, size and statistic."""
    found = []
    for op, size, statistic in loops[0]:
        mine, theirs = (np.array([turn[op, size, statistic] for turn in turns]) for turns in (ours, loops))
        ratio, (low, high) = float(np.median(mine / theirs)), _interval(mine / theirs)
        found.append({
            "op": op, "bytes": size, "statistic": statistic, "bench_us": float(np.median(mine)),
            "loop_us": float(np.median(theirs)), "ratio": ratio, "interval": [low, high],
            "agrees": low <= 1 <= high or abs(ratio - 1) <= FLOOR,
        })  # fmt: skip
    return found


def _interval(ratios: Any) -> tuple[float, float]:
    """95 % of resampled medians."""
    drawn = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")],
                        default=[1 << 16, 1 << 20, 1 << 22])  # fmt: skip
    options = parser.parse_args()
    measures = {"ours": benched, "loops": plain_loop}
    turns: dict[str, list[dict[Key, float]]] = {name: [] for name in measures}
    for turn in range(options.turns):
        for name in list(measures)[:: 1 if turn % 2 == 0 else -1]:
            turns[name].append(measures[name](options.sizes, options.rounds))
        print(f"turn {turn + 1}: " + ", ".join(
            f"{op} {size} B {turns['ours'][-1][op, size, statistic]:.0f} and {us:.0f} µs"
            for (op, size, statistic), us in turns["loops"][-1].items() if statistic == "min_us"
        ), flush=True)  # fmt: skip
    rows = compare(turns["ours"], turns["loops"])
    for row in rows:
        head = f"{row['op']:<12}{row['bytes']:>9} B {row['statistic']:<8}"
        rates = f"bench {row['bench_us']:.0f} µs, loop {row['loop_us']:.0f} µs, ratio {row['ratio']:.3f}"
        print(f"{head}: {rates} ({row['interval'][0]:.2f} to {row['interval'][1]:.2f}): "
              f"{'agrees' if row['agrees'] else 'differs'}")  # fmt: skip
    print(json.dumps({"benchmark": "bench_agrees", "turns": options.turns, "rows": rows}))


if __name__ == "__main__":
    main()
