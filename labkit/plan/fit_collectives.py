"""Fit latency and bandwidth of links on measured collectives and write data/hardware/links.toml.

    python -m labkit.plan.fit_collectives ../shared/data

Reads gpu-profiles/*.{all_reduce,send_recv}.csv and takes the median over ranks and repetitions; times of groups that
are spread over nodes otherwise (`devices_per_node`) are never mixed. Least absolute error of log time, every octave of
sizes with the same weight, by iteratively reweighted Gauss–Newton on (log latency, log bandwidth).
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from labkit.plan.collective_cost import wire_bytes


class Sample(NamedTuple):
    degree: int
    ranks_per_node: int
    num_bytes: float
    seconds: float


class Fit(NamedTuple):
    latency_s: float
    bandwidth: float
    residual: float
    """Mean absolute relative error, each octave of sizes weighing the same."""
    num_samples: int
    lanes: int = 1


def read_samples(file: Path, operation: str) -> list[Sample]:
    """One sample a (ranks, ranks a node, size): the median of medians, in seconds."""
    groups: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    with file.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            key = int(row["num_workers"]), int(row["devices_per_node"]), int(row["size"])
            groups[key].append(float(row[f"time_stats.{operation}.median"]) * 1e-3)
    return [Sample(*key, median(times)) for key, times in groups.items()]


def fit(samples: list[Sample], operation: str, lanes: int = 1) -> Fit:
    """Latency and the bandwidth of one lane."""
    wire = np.array([
        wire_bytes(operation, s.num_bytes, s.degree) / min(max(1, s.ranks_per_node), lanes) for s in samples
    ])  # fmt: skip
    seconds = np.log([s.seconds for s in samples])
    octave = np.floor(np.log2([s.num_bytes for s in samples])).astype(int)
    weight = 1 / np.bincount(octave)[octave]
    x = np.log([30e-6, 50e9])
    for _ in range(80):
        parts = np.stack([np.full(len(wire), np.exp(x[0])), wire / np.exp(x[1])])
        error = np.log(parts.sum(0)) - seconds
        slope = np.stack([parts[0], -parts[1]], 1) / parts.sum(0)[:, None]
        scaled = (weight / np.maximum(np.abs(error), 0.02))[:, None]
        step = np.linalg.solve(slope.T @ (slope * scaled) + 1e-9 * np.eye(2), slope.T @ (scaled[:, 0] * error))
        x = x - np.clip(step, -0.5, 0.5)
    found = np.exp(x[0]) + wire / np.exp(x[1])
    relative = np.abs(found / np.exp(seconds) - 1)
    return Fit(
        float(np.exp(x[0])), float(np.exp(x[1])), float((weight * relative).sum() / weight.sum()), len(wire), lanes
    )


def _inside(samples: list[Sample], degrees: tuple[int, ...]) -> list[Sample]:
    return [s for s in samples if s.degree == s.ranks_per_node and s.degree in degrees]


def _across(samples: list[Sample]) -> list[Sample]:
    return [s for s in samples if s.degree > s.ranks_per_node]


def fit_all(profiles: Path) -> dict[tuple[str, str], tuple[Fit, Fit]]:
    """(device, link) → fits of collectives and of messages. The H100's network was measured with messages only: its
    collectives get that bandwidth and the A100's latency."""
    found: dict[tuple[str, str], tuple[Fit, Fit]] = {}
    for device in ("a100", "h100"):
        dgx = read_samples(profiles / f"{device}_dgx.all_reduce.csv", "all_reduce")
        pairs = read_samples(profiles / f"{device}_pairwise_nvlink.all_reduce.csv", "all_reduce")
        sent = read_samples(profiles / f"{device}_dgx.send_recv.csv", "send_recv")
        found[device, "nvlink"] = fit(_inside(dgx, (2, 4, 8)), "all_reduce"), fit(_inside(sent, (2,)), "isend")
        over = fit(_inside(pairs, (4,)), "all_reduce")
        found[device, "pcie"] = over, over
        message = fit(_across(sent), "isend")
        far = _across(dgx)
        net = min((fit(far, "all_reduce", lanes) for lanes in (1, 2, 4, 8)), key=lambda f: f.residual) if far else None
        if net is None:
            net = message._replace(latency_s=found["a100", "network"][0].latency_s, lanes=8)
        found[device, "network"] = net, message
    return found


def _line(name: str, value: float, unit: str, residual: float, source: str = "fit") -> str:
    return (
        f'{name} = {{ value = {value:.4g}, unit = "{unit}", origin = "fitted", source = "{source}", '
        f"residual = {residual:.3f} }}"
    )


def to_toml(found: dict[tuple[str, str], tuple[Fit, Fit]], sheets: dict[tuple[str, str], float]) -> str:
    """The whole file. `sheets`: datasheet rates, for the share of them that collectives reach."""
    lines = [
        "# Written by `python -m labkit.plan.fit_collectives`; run it again rather than edit this.", "",
        "[sources]",
        'fit = "labkit/plan/fit_collectives.py on network profiles of microsoft/vidur (MIT), data/profiling/network"',
        'usual = "geometric mean over A100 and H100 of what was fitted, as a share of the datasheet rate"',
        'nic = "a network card of 400 Gb/s for each GPU, as in a DGX H100 (NVIDIA datasheet)"',
    ]  # fmt: skip
    for (device, kind), (collective, message) in found.items():
        lines += [
            "", f"[{device}.{kind}] # {collective.num_samples} collectives, {message.num_samples} messages",
            _line("latency_s", collective.latency_s, "s", collective.residual),
            _line("bandwidth", collective.bandwidth, "B/s", collective.residual),
            _line("message_latency_s", message.latency_s, "s", message.residual),
            _line("message_bandwidth", message.bandwidth, "B/s", message.residual),
        ]  # fmt: skip
        lines += [f"lanes = {collective.lanes}"] if kind == "network" else []
    for kind in ("nvlink", "pcie", "network"):
        fits = [(key, pair) for key, pair in found.items() if key[1] == kind]
        if kind == "network":
            fits = [each for each in fits if each[0][0] == "h100"]
        shares = np.array([pair[0].bandwidth / sheets[key] for key, pair in fits])
        mean = float(np.exp(np.log(shares).mean()))
        lines += ["", f"[usual.{kind}]"]
        lines += [f"datasheet = {sheets['h100', 'network']:.4g}", "lanes = 8"] if kind == "network" else []
        spread = float(np.abs(shares / mean - 1).max())
        lines += [_line("share", mean, "of the datasheet", spread, "nic" if kind == "network" else "usual")]
        for at, name in ((0, "latency_s"), (1, "message_latency_s")):
            values = np.array([pair[at].latency_s for _, pair in fits])
            usual = float(np.exp(np.log(values).mean()))
            lines += [_line(name, usual, "s", float(np.abs(values / usual - 1).max()), "usual")]
    return "\n".join(lines) + "\n"


def main(data: str) -> None:
    from labkit.plan.hardware import hardware_dir

    sheets = {
        ("a100", "nvlink"): 300e9, ("h100", "nvlink"): 450e9, ("a100", "pcie"): 32e9, ("h100", "pcie"): 64e9,
        ("a100", "network"): 25e9, ("h100", "network"): 50e9,
    }  # fmt: skip
    found = fit_all(Path(data) / "gpu-profiles")
    (hardware_dir() / "links.toml").write_text(to_toml(found, sheets), encoding="utf-8")
    for (device, kind), (collective, message) in found.items():
        print(f"{device:<6}{kind:<9}", *(f"{f.latency_s * 1e6:8.1f} us {f.bandwidth / 1e9:7.1f} GB/s ± {f.residual:.0%}"
                                         for f in (collective, message)))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
