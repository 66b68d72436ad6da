"""A server that answers on a known schedule, and what a client says about it beside what it did.

The server is one C file outside this project; it promises TTFT 50 ms and TPOT 10 ms and logs its own instants.
"""

from __future__ import annotations

import contextlib
import csv
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from labkit.load.driver import DriverProcess
from labkit.load.lengths import Lengths
from labkit.load.report import LoadReport
from labkit.load.spec import RunSpec
from labkit.load.target import Target
from labkit.load.workload import Part, Workload
from labkit.measure.records import RequestRecord
from labkit.paths import repo_dir

TTFT_MS, TPOT_MS, NUM_TOKENS = 50.0, 10.0, 32
AIMS = {20.0: (0.2, 1.5), 200.0: (0.5, 10.0)}
"""Requests per second: (p50, p99) in ms that TTFT may be off by."""
RATE_AIM_PERCENT = 0.5
WORKLOAD = Workload(
    name="truth",
    title="64 tokens in, 32 out",
    parts=(Part(Lengths("constant", tokens=64), Lengths("constant", tokens=NUM_TOKENS)),),
)


@dataclass(frozen=True)
class Truth:
    """One line of the server's log; ns of CLOCK_MONOTONIC."""

    received_ns: int
    first_ns: int
    last_ns: int
    num_tokens: int
    cut: int
    late_ns: int


def default_source() -> Path:
    return repo_dir().parent / "shared" / "tools" / "known-schedule-server" / "server.c"


def build(source: Path, folder: Path) -> Path:
    """Compiles the server. Raises SystemExit with a sentence when the source or a C compiler is missing."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not source.is_file():
        raise SystemExit(f"The known-schedule server is not at {source}: give its C file with --source. Skipped.")
    if compiler is None:
        raise SystemExit("No C compiler (cc, gcc, clang) was found to build the known-schedule server. Skipped.")
    binary = folder / "known-schedule-server"
    subprocess.run([compiler, "-O2", "-w", "-o", str(binary), str(source)], check=True)
    return binary


@contextlib.contextmanager
def served(binary: Path, log: Path, options: Sequence[str]) -> Iterator[Target]:
    """The server while the context lasts, ahead of other processes where the system allows it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    promptly = ["chrt", "-f", "50"] if os.geteuid() == 0 and shutil.which("chrt") else []
    fixed = [f"port={port}", f"ttft={TTFT_MS}", f"tpot={TPOT_MS}", f"n={NUM_TOKENS}", f"log={log}"]
    process = subprocess.Popen([*promptly, str(binary), *options, *fixed])
    try:
        _wait_for(port, process)
        yield Target(url=f"http://127.0.0.1:{port}", model="m")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)


def _wait_for(port: int, process: subprocess.Popen[bytes], limit_s: float = 5.0) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise SystemExit(f"the known-schedule server did not listen on port {port} within {limit_s:g} s.")


def read_log(log: Path) -> list[Truth]:
    """The server's rows without the client's trial request, in order of reception."""
    with log.open() as lines:
        rows = [
            Truth(*(int(row[name]) for name in ("t0", "first", "last", "n", "cut", "maxlate")))
            for row in csv.DictReader(lines)
        ]
    return sorted((row for row in rows if row.num_tokens != 1), key=lambda row: row.received_ns)


def measure(
    driver: DriverProcess, binary: Path, options: Sequence[str], rate: float, seconds: float
) -> tuple[LoadReport, list[Truth]]:
    """One run, and what the server says about it."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "truth.csv"
        with served(binary, log, options) as target:
            run = RunSpec(target=target, run_id="truth", workload=WORKLOAD, rate=rate, seconds=seconds, seed=1)
            report = driver.run(run, timeout_s=seconds + 60)
        return report, read_log(log)


# ---- figures, all in ms


def ttft_ms(record: RequestRecord) -> float:
    return (record.first_ns - record.scheduled_ns) / 1e6


def tpot_ms(record: RequestRecord) -> float:
    return (record.last_ns - record.first_ns) / (record.n - 1) / 1e6


def itl_ms(records: Sequence[RequestRecord]) -> np.ndarray:
    """Per token: a chunk of k tokens after a gap g is k samples of g / k."""
    pooled = [
        (now - before) / 1e6 / tokens
        for record in records
        for before, now, tokens in zip(record.chunk_ns, record.chunk_ns[1:], record.chunk_tokens[1:], strict=False)
        for _ in range(tokens)
    ]
    return np.array(pooled)


def completed(report: LoadReport) -> list[RequestRecord]:
    return [record for record in report.records if record.status == "completed"]


def pairs(report: LoadReport, truths: list[Truth]) -> list[tuple[RequestRecord, Truth]]:
    """Each sent request with the server's row for it: both in order of sending."""
    sent = sorted((record for record in report.records if record.sent_ns), key=lambda record: record.sent_ns)
    if len(sent) != len(truths):
        raise SystemExit(f"the client sent {len(sent)} requests, the server saw {len(truths)}.")
    return list(zip(sent, truths, strict=True))


def accuracy(rate: float, report: LoadReport, truths: list[Truth]) -> dict[str, float | bool]:
    """How far each figure is off, by request: what the client says minus what the server did."""
    both = [(record, truth) for record, truth in pairs(report, truths) if record.status == "completed"]
    ttft = np.array([ttft_ms(record) - (truth.first_ns - truth.received_ns) / 1e6 for record, truth in both])
    tpot = np.array(
        [tpot_ms(record) - (truth.last_ns - truth.first_ns) / (truth.num_tokens - 1) / 1e6 for record, truth in both]
    )
    itl = itl_ms([record for record, _ in both])
    plain = np.array([ttft_ms(record) for record, _ in both])
    off = {
        "rate": rate,
        "n": len(both),
        "ttft_off_p50_ms": _percentile(ttft, 50),
        "ttft_off_p99_ms": _percentile(ttft, 99),
        "ttft_minus_nominal_p50_ms": _percentile(plain, 50) - TTFT_MS,
        "ttft_minus_nominal_p99_ms": _percentile(plain, 99) - TTFT_MS,
        "tpot_off_p50_ms": _percentile(abs(tpot), 50),
        "tpot_off_p99_ms": _percentile(abs(tpot), 99),
        "itl_off_p50_ms": abs(_percentile(itl, 50) - TPOT_MS),
        "itl_off_p99_ms": abs(_percentile(itl, 99) - TPOT_MS),
        "rate_off_percent": 100 * abs(report.offered_rate / rate - 1),
        "lateness_p99_ms": report.lateness.p99_ms,
        "server_late_p99_ms": _percentile(np.array([truth.late_ns / 1e6 for _, truth in both]), 99),
    }
    aim = AIMS.get(rate)
    if aim is not None:
        off["within_aim"] = bool(
            abs(off["ttft_off_p50_ms"]) <= aim[0]
            and abs(off["ttft_off_p99_ms"]) <= aim[1]
            and off["rate_off_percent"] <= RATE_AIM_PERCENT
        )
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in off.items()}


def _percentile(values: np.ndarray, q: float) -> float:
    return float(np.percentile(values, q))
