"""Made-up frames and figures of the page Fabric, for tests of the drawing alone; see `synthetic`.

The links are made up, what follows from them is not: rows, lines and messages are computed as the lab server would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.engine.bench_messages import Benched, BenchLink
from labkit.layout import Layout
from labkit.layout.fabrics import group_fabrics
from labkit.measure.collectives import PINGPONG
from labkit.measure.link_bench import CURVE_OPS, LinkBench, curve_fits, curve_groups
from labkit.measure.step_messages import layout_messages
from labkit.model.spec import load_spec
from labkit.show import fabric_frame as ff
from labkit.show import frame as f

LINKS = {"shm": (10_600.0, 14.6), "gloo": (46_000.0, 0.024), "nccl": (12_300.0, 380.0)}
"""α in ns, and bytes a nanosecond."""
MODEL = "llama-3.1-8b"


def groups(slug: str, fabric: str, nodes: Sequence[int]) -> list[dict[str, Any]]:
    return [vars(group) for group in group_fabrics(Layout.parse(slug), fabric, nodes)]


def told(slug: str, fabric: str, nodes: Sequence[int] = (), num_gpus: int = 0) -> dict[str, Any]:
    """As GET /lab/bench tells it, of every rank of the layout."""
    layout, num_ranks = Layout.parse(slug), Layout.parse(slug).world_size

    async def ask(message: BenchLink) -> Mapping[int, Benched]:
        alpha_ns, per_ns = LINKS.get(message.fabric, (1.0, 1.0))
        way = alpha_ns * (1 + 0.02 * sum(message.ranks)) + message.num_bytes / per_ns
        times = [round(2 * way if message.op == PINGPONG else way)] * message.num_rounds
        return {rank: Benched(1, rank, times if rank in message.ranks else [], 0) for rank in range(num_ranks)}

    async def measure() -> tuple[list[Any], list[Any]]:
        bench = LinkBench(ask, device="cuda" if num_gpus else "cpu", dtype="bfloat16")
        chosen = curve_groups(groups(slug, fabric, nodes), num_ranks, fabric, nodes)
        rows = [row for group in chosen for op in CURVE_OPS for row in await bench.curve(group, op)]
        return await bench.pairs(num_ranks, fabric, nodes), rows

    pairs, rows = asyncio.run(measure())
    fits = curve_fits(rows)
    gpus = [{"index": i, "name": "NVIDIA H200", "numa_node": i // 4} for i in range(num_gpus)]
    links = [{"first": 0, "second": i, "num_nvlinks": 18, "way": "several PCIe switches"} for i in range(1, num_gpus)]
    return {
        "measured": {
            "measured_at": "2026-11-30T11:46:00+00:00", "took_s": 11.0, "layout": slug, "layout_name": str(layout),
            "model": MODEL, "dtype": "bfloat16", "num_cores": 2, "threads_per_rank": 1, "wrong": 0, "pairs": pairs,
            "others_busy_cores": 1.24,
            "rows": rows, "fits": fits, "backend": "nccl" if num_gpus else "gloo",
        },
        "messages": layout_messages(layout, load_spec(MODEL), 2, [*fits], [*groups(slug, fabric, nodes)]),
        "machine": {
            "host": "node-with-a-long-name", "num_cores": 2, "memory_bytes": 25 << 30,
            "numa_nodes": {"0": [0, 1], "1": [2, 3]}, "gpus": gpus, "gpu_links": links,
        },
        "cores_of_ranks": {str(rank): [0, 1] for rank in range(num_ranks)},
        "progress": None,
    }  # fmt: skip


def frame(slug: str, fabric: str, nodes: Sequence[int] = (), num_gpus: int = 0) -> ff.FabricFrame:
    layout = Layout.parse(slug)
    num_ranks = layout.world_size
    machine = f.Machine("node-with-a-long-name", MODEL, "cuda" if num_gpus else "cpu", "cpu", fabric, "bfloat16", 2,
                        num_ranks, 1)  # fmt: skip
    at = nodes or [0] * num_ranks
    return ff.FabricFrame(
        link="connected", lab=f.Lab("ready", slug, str(layout), machine),
        nodes=[{"node": node, "host": "node-with-a-long-name", "ranks": [r for r, n in enumerate(at) if n == node]}
               for node in sorted(set(at))],
        groups=groups(slug, fabric, nodes), link_between="200mbit" if nodes else "",
        measured_at="2026-11-30 11:46", provenance="measured",
        telemetry=nvml(num_gpus) if num_gpus else psutil_of(num_ranks), timeline=timeline(num_ranks),
    )  # fmt: skip


def _minute(*values: float) -> list[float | None]:
    return [None] * 20 + [values[i % len(values)] for i in range(40)]


def psutil_of(num_ranks: int) -> ff.Telemetry:
    values = {"cpu_cores": 0.85, "memory_used_bytes": 515e6}
    host = {"memory_used_bytes": 9.8e9, "memory_total_bytes": 25e9, "net_sent_bytes_per_s": 6e5}
    ranks = [ff.Device("rank", rank, values, {"cpu_cores": _minute(0.2, 0.9), "memory_used_bytes": _minute(5e8)})
             for rank in range(num_ranks)]  # fmt: skip
    return ff.Telemetry("psutil", 60, [*ranks, ff.Device("host", 0, host, {n: _minute(v) for n, v in host.items()})])


def nvml(num_gpus: int) -> ff.Telemetry:
    values = {"utilisation_percent": 97.0, "memory_used_bytes": 1.2e11, "memory_total_bytes": 1.5e11, "power_w": 685.0,
              "sm_mhz": 1785.0, "temperature_c": 61.0, "nvlink_tx_bytes_per_s": 2e10, "pcie_rx_bytes_per_s": 3e8}
    gpus = [ff.Device("gpu", i, values, {name: _minute(value, value / 2) for name, value in values.items()},
                      ["power cap", "hot (software)"] if i == 3 else []) for i in range(num_gpus)]  # fmt: skip
    return ff.Telemetry("nvml", 60, gpus)


def timeline(num_ranks: int) -> ff.Timeline:
    steps = [ff.TimelineStep(i, 0, 14.0 * i, 14.0 * i + 12, 512 if i == 2 else 0, 3) for i in range(8)]
    ranks = []
    for rank in range(num_ranks):
        bars = [[14.0 * i + at, length, kind] for i in range(8)
                for at, length, kind in ((0, 5, 0), (5, 2, 1), (7, 1, 2), (8, 1, 3), (9, 3, 0))]  # fmt: skip
        ranks.append(ff.TimelineRank(rank, bars, 52 if rank == 1 else 4, 56))
    return ff.Timeline(112.0, steps, ranks, one_clock=num_ranks < 8)


def cases() -> dict[str, tuple[ff.FabricFrame, dict[str, Any]]]:
    """Name: frame, and what was measured."""
    two_nodes = [0, 0, 0, 0, 1, 1, 1, 1]
    measuring = frame("tp2", "shm")
    what = {"kind": "curve", "op": "reduce_scatter", "fabric": "gloo", "ranks": 2}
    measuring.progress = ff.Progress(7, 16, what, True)
    return {
        "eight GPUs": (frame("dp2xtp4", "nccl", num_gpus=8), told("dp2xtp4", "nccl", num_gpus=8)),
        "two nodes": (frame("pp2xtp4", "shm", two_nodes), told("pp2xtp4", "shm", two_nodes)),
        "four ranks": (frame("pp2xtp2", "shm"), told("pp2xtp2", "shm")),
        "measuring": (measuring, told("tp2", "shm")),
        "nothing measured": (frame("tp2", "shm"), {}),
        "no server": (ff.FabricFrame(link="absent"), {}),
    }
