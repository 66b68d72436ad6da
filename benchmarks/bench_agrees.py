"""What `labkit bench collectives` measures against a plain timed loop over torch.distributed: do the figures agree?

The loop is what one would write by hand, and knows nothing of labkit: meet, call, note the time; of each round the
slower rank. Two processes do both, turn about, each over a gloo group of its own: between two pairs of processes the
same call differs by a third on a busy machine (where memory lies, which core a thread has), and that would be compared
instead. Each turn gives a ratio of the medians and one of the quickest rounds; the interval is a bootstrap over turns.
They agree when it holds 1, or the ratio is within a twentieth of it. Prints the figures, and one JSON line last.

    python benchmarks/bench_agrees.py [--turns 12] [--rounds 60] [--sizes 65536,1048576,4194304]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

IN_PLACE = {"all_reduce": True, "all_gather": False}
FLOOR = 0.05
"""No two ways to take a time agree better than this on a machine with other processes."""
STATISTICS = {"min_us": np.min, "time_us": np.median}
WARMUP = 5
Times = dict[tuple[str, int], list[list[int]]]
"""By operation and bytes of the whole buffer: nanoseconds of each round, turn by turn."""
Key = tuple[str, int, str]
"""Operation, bytes, statistic."""


def measured(sizes: list[int], num_turns: int, num_rounds: int) -> list[list[dict[Key, float]]]:
    """Microseconds of each turn: the bench's turns, and the plain loop's."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = spawn.Queue()
        ranks = [
            spawn.Process(target=_rank, args=(rank, folder, sizes, num_turns, num_rounds, results)) for rank in (0, 1)
        ]
        for rank in ranks:
            rank.start()
        told = [results.get(timeout=600) for _ in ranks]
        for rank in ranks:
            rank.join()
    return [[_of_turn([each[way] for each in told], turn) for turn in range(num_turns)] for way in (0, 1)]


def _of_turn(of_ranks: list[Times], turn: int) -> dict[Key, float]:
    found = {}
    for op, size in of_ranks[0]:
        slower = np.max([times[op, size][turn] for times in of_ranks], axis=0) / 1e3
        found |= {(op, size, name): float(of(slower)) for name, of in STATISTICS.items()}
    return found


def _rank(rank: int, folder: str, sizes: list[int], num_turns: int, num_rounds: int, results: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/plain", rank=rank, world_size=2)
    ways = (_bench(rank, Path(folder), num_rounds), _plain_loop(num_rounds))
    times: tuple[Times, Times] = ({}, {})
    for turn in range(num_turns):
        for op in IN_PLACE:
            for size in sizes:
                for way in (0, 1) if turn % 2 == 0 else (1, 0):
                    dist.barrier()
                    times[way].setdefault((op, size), []).append(ways[way](op, size))
    results.put(times)
    dist.destroy_process_group()


def _bench(rank: int, folder: Path, num_rounds: int) -> Callable[[str, int], list[int]]:
    """As a rank of a lab measures it when it is asked to."""
    import torch.distributed as dist

    from labkit.engine.bench_messages import BenchLink
    from labkit.parallel.bench import bench_link
    from labkit.parallel.fabric_torch import TorchFabric
    from labkit.parallel.mesh import MeshFactory, WireCache

    meshes = MeshFactory(rank, folder, "cpu")
    store = dist.FileStore(str(folder / "bench"), 2)
    meshes.wires = WireCache({"gloo": lambda: TorchFabric("gloo", store)})

    def run(op: str, size: int) -> list[int]:
        message = BenchLink(
            epoch=0, serial=0, ranks=[0, 1], fabric="gloo", op=op, num_bytes=size, in_place=IN_PLACE[op],
            dtype="float32", num_warmup=WARMUP, num_rounds=num_rounds, check=True,
        )  # fmt: skip
        answer = bench_link(message, meshes)
        assert not answer.num_wrong
        return answer.times_ns

    return run


def _plain_loop(num_rounds: int) -> Callable[[str, int], list[int]]:
    import torch
    import torch.distributed as dist

    def run(op: str, size: int) -> list[int]:
        whole, half = torch.ones(size // 4), torch.ones(size // 8)
        took = []
        for _ in range(num_rounds + WARMUP):
            dist.barrier()
            began = time.monotonic_ns()
            if op == "all_reduce":
                dist.all_reduce(whole)
            else:
                dist.all_gather_into_tensor(torch.empty(2 * half.numel()), half)
            took.append(time.monotonic_ns() - began)
        return took[WARMUP:]

    return run


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
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")],
                        default=[1 << 16, 1 << 20, 1 << 22])  # fmt: skip
    options = parser.parse_args()
    ours, loops = measured(options.sizes, options.turns, options.rounds)
    rows = compare(ours, loops)
    for row in rows:
        head = f"{row['op']:<12}{row['bytes']:>9} B {row['statistic']:<8}"
        rates = f"bench {row['bench_us']:.0f} µs, loop {row['loop_us']:.0f} µs, ratio {row['ratio']:.3f}"
        print(f"{head}: {rates} ({row['interval'][0]:.2f} to {row['interval'][1]:.2f}): "
              f"{'agrees' if row['agrees'] else 'differs'}")  # fmt: skip
    print(json.dumps({"benchmark": "bench_agrees", "turns": options.turns, "rows": rows}))


if __name__ == "__main__":
    main()
