"""What one all-reduce costs between two CPU ranks, by fabric and size, through the door as the decoder
calls it.

    python benchmarks/collectives_quick.py [--ranks 2] [--rounds 2000]

Every round's result is checked. A row is the slower rank of each round: median and p90 (numpy, linear) in
microseconds, and bus bandwidth 2(n-1)/n x bytes / median. The last line is JSON. Run it on a quiet machine:
with more ranks or neighbours than cores it measures the system's scheduler.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

SIZES_BYTES = (2 << 10, 16 << 10, 128 << 10, 1 << 20, 4 << 20)


def _rank(rank: int, size: int, folder: str, rounds: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from labkit.parallel.comm import Door, Fabric, Group
    from labkit.parallel.fabric_shm import ShmFabric
    from labkit.parallel.fabric_torch import TorchFabric

    torch.set_num_threads(1)
    ranks = tuple(range(size))
    fabrics: tuple[Fabric, ...] = (
        ShmFabric(Path(folder)),
        TorchFabric("gloo", dist.FileStore(f"{folder}/store", size)),
    )
    with torch.inference_mode():
        for fabric in fabrics:
            fabric.suit(size)
            wire = fabric.open("bench", ranks, rank)
            for num_bytes in SIZES_BYTES:
                for recording in (True, False):
                    group = Group(rank, size, "tp", ranks, wire=wire, door=Door(recording=recording))
                    count = max(
                        20,
                        min(rounds, rounds * (64 << 10) // num_bytes // (10 if fabric.name == "gloo" else 1)),
                    )
                    pipe.send((fabric.name, num_bytes, recording, _time(group, num_bytes, count)))
    pipe.send(None)


def _time(group, num_bytes: int, rounds: int) -> list[int]:
    import torch

    x = torch.empty(num_bytes // 4)
    want = float(sum(range(1, group.size + 1)))
    took = []
    for i in range(rounds + rounds // 10):
        x.fill_(group.rank + 1.0)
        began = time.monotonic_ns()
        group.all_reduce(x)
        took.append(time.monotonic_ns() - began)
        if not bool((x == want).all()):
            raise SystemExit(f"round {i}: the sum is {float(x[0])}, not {want}")
        if i % 1024 == 1023:
            group.door.drain()
    return took[rounds // 10 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2000)
    options = parser.parse_args()
    root = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=root) as folder:
        rows = _collect(options.ranks, options.rounds, folder)
    _print(rows, options.ranks)


def _collect(size: int, rounds: int, folder: str) -> list[dict[str, object]]:
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = spawn.Pipe()
        processes.append(spawn.Process(target=_rank, args=(rank, size, folder, rounds, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    rows = []
    while (first := pipes[0].recv()) is not None:
        told = [first, *(pipe.recv() for pipe in pipes[1:])]
        slowest = np.max([took for *_, took in told], axis=0) / 1e3
        fabric, num_bytes, recording, _ = first
        rows.append(
            {
                "fabric": fabric,
                "bytes": num_bytes,
                "recording": recording,
                "n": len(slowest),
                "median_us": round(float(np.percentile(slowest, 50)), 2),
                "p90_us": round(float(np.percentile(slowest, 90)), 2),
            }
        )
    for process in processes:
        process.join(5)
    return rows


def _print(rows: list[dict], size: int) -> None:
    print(f"{size} ranks on {os.cpu_count()} cores, 1 thread each; all_reduce of float32; the slower rank's time")
    print(f"{'fabric':8}{'bytes':>10}{'recording':>11}{'median us':>11}{'p90 us':>10}{'bus GB/s':>10}{'n':>7}")
    for row in rows:
        bus = 2 * (size - 1) / size * row["bytes"] / row["median_us"] / 1e3
        recording = "on" if row["recording"] else "off"
        print(
            f"{row['fabric']:8}{row['bytes']:>10}{recording:>11}{row['median_us']:>11.1f}{row['p90_us']:>10.1f}"
            f"{bus:>10.2f}{row['n']:>7}"
        )
    print(json.dumps({"ranks": size, "all_reduce": rows}))


if __name__ == "__main__":
    main()
