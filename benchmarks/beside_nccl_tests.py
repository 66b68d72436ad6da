"""`labkit bench collectives` over NCCL beside nccl-tests' own programs, on the GPUs of this machine.

Needs two GPUs or more, and all_reduce_perf, all_gather_perf, reduce_scatter_perf and alltoall_perf on the path or in
--folder. Both check their results. Prints bus bandwidth of both by operation, size and place; one JSON line last.

    python benchmarks/beside_nccl_tests.py [--ranks 2] [--folder nccl-tests/build] [--sizes 1048576,67108864]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
from typing import Any

from labkit.cluster.topology import look_at_machine
from labkit.lab.bench import BenchPlan, measure
from labkit.layout import Layout
from labkit.measure.nccl_tests import parse

PROGRAMS = {
    "all_reduce": "all_reduce_perf",
    "all_gather": "all_gather_perf",
    "reduce_scatter": "reduce_scatter_perf",
    "all_to_all": "alltoall_perf",
}
Key = tuple[str, int, bool]
"""Operation, bytes, in place."""


def theirs(program: str, op: str, sizes: list[int], num_ranks: int) -> dict[Key, dict[str, Any]]:
    found: dict[Key, dict[str, Any]] = {}
    for size in sizes:
        words = [program, "-g", str(num_ranks), "-b", str(size), "-e", str(size), "-d", "float", "-c", "1"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        found |= {(op, row["bytes"], row["in_place"]): row for row in parse(done.stdout)}
    return found


def ours(ops: list[str], sizes: list[int], num_ranks: int) -> dict[Key, dict[str, Any]]:
    plan = BenchPlan(Layout(tp=num_ranks), ops=ops, num_bytes=sizes, fabric="nccl", device="cuda", num_rounds=50)
    return {(row["op"], row["bytes"], row["in_place"]): row for row in asyncio.run(measure(plan))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", help="where nccl-tests was built, if not on the path")
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")],
                        default=[1 << 12, 1 << 20, 1 << 26])  # fmt: skip
    options = parser.parse_args()
    num_gpus = len(look_at_machine().gpus)
    if num_gpus < options.ranks:
        sys.exit(f"{options.ranks} ranks need as many GPUs, and this machine has {num_gpus}.")
    programs = {op: path for op, name in PROGRAMS.items() if (path := shutil.which(name, path=options.folder))}
    if not programs:
        sys.exit(f"None of {', '.join(PROGRAMS.values())} was found: build nccl-tests and name its folder (--folder).")
    mine = ours(list(programs), options.sizes, options.ranks)
    rows = []
    for op, program in programs.items():
        for key, row in theirs(program, op, options.sizes, options.ranks).items():
            if key in mine:
                both = {"ours_gb_s": mine[key]["busbw_gb_s"], "theirs_gb_s": row["busbw_gb_s"]}
                rows.append({"op": op, "bytes": key[1], "in_place": key[2], **both})
                head = f"{op:<15}{key[1]:>10} B {'in place' if key[2] else 'apart':<9}"
                print(f"{head}{both['ours_gb_s']:9.2f} GB/s, theirs {both['theirs_gb_s']:.2f}")
    print(json.dumps({"benchmark": "beside_nccl_tests", "ranks": options.ranks, "rows": rows}))


if __name__ == "__main__":
    main()
