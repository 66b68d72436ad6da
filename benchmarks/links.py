"""What a shaped link between two nodes on one machine gives, against what its rate predicts. Needs root and iproute2.

    python benchmarks/links.py [--rates 0,100mbit,200mbit] [--bytes 1048576] [--rounds 20]

Two ranks, each in a namespace of its own, all-reduce one buffer over gloo. In an all-reduce of n bytes over two ranks
each sends n bytes and receives n, both ways at once; a packet of 1,448 bytes of payload takes 1,514 on the wire. So a
link of r bits/s predicts n × 8 ÷ r × 1514 ÷ 1448 seconds. Every result is checked; a round's time is the slower
rank's. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from labkit.cluster.namespaces import INTERFACE, inside
from labkit.cluster.nodes import Link, NodeKeeper, Nodes
from labkit.paths import repo_dir

WIRE_OVERHEAD = 1514 / 1448
DECODE_BYTES = 4096


def predicted_s(num_bytes: int, link: Link) -> float | None:
    if not link.rate_bits_per_s:
        return None
    return num_bytes * 8 / link.rate_bits_per_s * WIRE_OVERHEAD


async def measure(link: Link, sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """A row for each size. Raises NodesUnavailable."""
    keeper = NodeKeeper(Nodes(2, 1, link))
    await keeper.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            told = await asyncio.gather(*[_rank(keeper, index, folder, sizes, rounds) for index in range(2)])
    finally:
        await keeper.end()
    return [_row(link, size, np.max([times[str(size)] for times in told], axis=0)) for size in sizes]


async def _rank(keeper: NodeKeeper, index: int, folder: str, sizes: list[int], rounds: int) -> dict[str, list[float]]:
    words = [*inside(keeper.wiring.node(index)), sys.executable, __file__, "--rank", str(index), "--store",
             f"{folder}/store", "--bytes", ",".join(map(str, sizes)), "--rounds", str(rounds)]  # fmt: skip
    env = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONPATH": str(repo_dir())}
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE, env=env)
    said, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"rank {index} ended with status {process.returncode}")
    return json.loads(said)


def _row(link: Link, size: int, took_s: np.ndarray) -> dict[str, Any]:
    median_s, predicted = float(np.median(took_s)), predicted_s(size, link)
    return {
        "link": str(link),
        "bytes": size,
        "n": len(took_s),
        "median_ms": round(median_s * 1e3, 3),
        "best_ms": round(float(took_s.min()) * 1e3, 3),
        "p90_ms": round(float(np.percentile(took_s, 90)) * 1e3, 3),
        "mbit_per_s": round(size * 8 / median_s / 1e6, 1),
        "predicted_ms": None if predicted is None else round(predicted * 1e3, 3),
        "measured_over_predicted": None if predicted is None else round(median_s / predicted, 3),
        "best_over_predicted": None if predicted is None else round(float(took_s.min()) / predicted, 3),
    }


def be_a_rank(rank: int, store: str, sizes: list[int], rounds: int) -> None:
    import torch
    import torch.distributed as dist

    from labkit.parallel.comm import Group
    from labkit.parallel.fabric_torch import TorchFabric

    torch.set_num_threads(1)
    wire = TorchFabric("gloo", dist.FileStore(store, 2)).open("links", (0, 1), rank)
    group = Group(rank, 2, "tp", (0, 1), wire=wire)
    print(json.dumps({size: _time(group, size, rounds) for size in sizes}))


def _time(group: Any, num_bytes: int, rounds: int) -> list[float]:
    import torch

    x, took = torch.empty(num_bytes // 4), []
    for _ in range(rounds + 2):
        x.fill_(group.rank + 1.0)
        group.barrier()
        began = time.monotonic()
        group.all_reduce(x)
        took.append(time.monotonic() - began)
        if not bool((x == 3.0).all()):
            raise SystemExit(f"the sum is {float(x[0])}, not 3")
    return took[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="0,100mbit,200mbit")
    parser.add_argument("--bytes", default=f"{DECODE_BYTES},{1 << 20}")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [int(word) for word in options.bytes.split(",")]
    if options.rank is not None:
        return be_a_rank(options.rank, str(options.store), sizes, options.rounds)
    rows = []
    for rate in options.rates.split(","):
        rows += asyncio.run(measure(Link.parse("" if rate == "0" else rate), sizes, options.rounds))
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    print(json.dumps({"links": rows}))
    return None


if __name__ == "__main__":
    main()
