"""Our engine against vLLM on the CPU: the same checkpoint, the same load client, both behind HTTP, turn about.

The checkpoint is written once from a shipped config. Both servers stay up; only one is asked at a time, ours and
vLLM's by turns, and each pair of neighbouring runs gives one ratio, so that a machine whose speed drifts drifts for
both. Closed loop, greedy, 128 tokens in and 64 out, every prompt new. Beside TPOT stand the bytes of weights that a
decode step reads per second and what the machine's memory gave in the same minutes. Prints tables, one JSON line last.

    python benchmarks/against_vllm.py --vllm PATH/TO/vllm [--layouts tp1 tp2] [--concurrency 1 8] [--rounds 3]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from labkit.cluster.engine_plan import SERVED_NAME, EnginePlan
from labkit.cluster.engines import started as engine_started
from labkit.cluster.topology import look_at_machine, usable_cores
from labkit.layout import Layout
from labkit.load.driver import DriverProcess
from labkit.load.lengths import Lengths
from labkit.load.spec import RunSpec
from labkit.load.target import Target
from labkit.load.workload import Part, Workload
from labkit.measure.metrics import tpot_ms, ttft_ms
from labkit.model.spec import load_spec
from labkit.plan.deploy import deploy_flags
from labkit.site import die_with_parent, free_port

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
WORKLOAD = Workload(
    name="pair",
    title="128 tokens in, 64 out",
    parts=(Part(Lengths("constant", tokens=PROMPT_TOKENS), Lengths("constant", tokens=OUTPUT_TOKENS)),),
)
AIMS = {"tp1": 1.3, "tp2": 2.0}
"""vLLM's TPOT over ours, at least."""
AIM_TPOT_MS = {1: 10.0, 8: 17.0}


@dataclass
class Server:
    name: str
    url: str
    token: str
    model: str
    tpot_ms: dict[int, list[float]] = field(default_factory=dict)
    """Concurrency to the median of each run."""
    ttft_ms: dict[int, list[float]] = field(default_factory=dict)
    tokens_per_s: dict[int, list[float]] = field(default_factory=dict)

    def target(self) -> Target:
        return Target(url=self.url, token=self.token, model=self.model, labkit=self.name == "labkit")


@contextlib.contextmanager
def started(command: list[str], env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, env={**os.environ, **env}, stdout=sink, stderr=sink, preexec_fn=die_with_parent, process_group=0
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def wait_healthy(process: subprocess.Popen[bytes], url: str, log: Path, timeout_s: float = 600.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"The server ended with {process.returncode}:\n{log.read_text(errors='replace')[-2000:]}")
        with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            body = answer.read()
            if not body or json.loads(body).get("status") == "ready":
                return
        time.sleep(0.5)
    raise SystemExit(f"No answer from {url} within {timeout_s:.0f} s.")


@contextlib.contextmanager
def ours(checkpoint: Path, layout: str, scratch: Path) -> Iterator[Server]:
    num_ranks = Layout.parse(layout).world_size
    port, log = free_port(), scratch / f"labkit-{layout}.log"
    command = [
        sys.executable, "-m", "labkit.server", "serve", "--model", str(checkpoint), "--layout", layout,
        "--ranks", str(num_ranks), "--port", str(port), "--memory-per-rank", "1GiB",
    ]  # fmt: skip
    runtime = scratch / f"runtime-{layout}"
    runtime.mkdir(mode=0o700)
    env = {"LABKIT_TOKEN": "benchmark", "LABKIT_RUNTIME": str(runtime), "LABKIT_HOME": str(scratch / "home")}
    with started(command, env, log) as process:
        url = f"http://127.0.0.1:{port}"
        wait_healthy(process, url, log)
        yield Server("labkit", url, "benchmark", "")


@contextlib.contextmanager
def theirs(vllm: str, checkpoint: Path, layout: str, scratch: Path) -> Iterator[Server]:
    """As `labkit run --engine vllm` starts and ends it."""
    flags = deploy_flags("vllm", Layout.parse(layout))
    extra = ["--max-model-len", "2048"]
    plan = EnginePlan("vllm", [vllm, "serve"], str(checkpoint), flags.flags, flags.layout.world_size, {}, extra)
    with engine_started(plan, look_at_machine(), scratch / f"vllm-{layout}.log") as server:
        yield Server("vllm", server.url, "", SERVED_NAME)


def measure(server: Server, driver: DriverProcess, concurrency: int, num_requests: int, vocab_size: int) -> None:
    spec = RunSpec(
        target=server.target(), run_id=f"{server.name}-{time.monotonic_ns()}", workload=WORKLOAD,
        num_requests=num_requests + concurrency, num_warmup=concurrency, concurrency=concurrency,
        vocab_size=vocab_size,
    )  # fmt: skip
    records = [record for record in driver.run(spec).records if not record.warmup]
    bad = [record for record in records if record.status != "completed" or record.n != OUTPUT_TOKENS]
    if bad:
        raise SystemExit(f"{server.name}: {len(bad)} of {len(records)} requests went wrong: {bad[0].error or bad[0]}")
    span_s = (max(r.last_ns for r in records) - min(r.scheduled_ns for r in records)) / 1e9
    server.tpot_ms.setdefault(concurrency, []).append(median(tpot_ms(r) for r in records))
    server.ttft_ms.setdefault(concurrency, []).append(median(ttft_ms(r) for r in records))
    server.tokens_per_s.setdefault(concurrency, []).append(sum(r.n for r in records) / span_s)


def median(values: Iterator[float | None]) -> float:
    return statistics.median(value for value in values if value is not None)


def memory_bandwidth() -> float:
    """Bytes per second that all cores together read, in a child of its own: the best of ten sums over 256 MiB."""
    code = (
        "import time, torch\n"
        "x = torch.ones(64 * 2**20)\n"
        "best = min((lambda t: (x.sum().item(), time.perf_counter() - t)[1])(time.perf_counter()) for _ in range(10))\n"
        "print(x.nbytes / best)"
    )
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def compare(
    layout: str, args: argparse.Namespace, checkpoint: Path, scratch: Path, driver: DriverProcess
) -> list[dict]:
    vocab_size = load_spec(checkpoint).vocab_size
    with ours(checkpoint, layout, scratch) as a, theirs(args.vllm, checkpoint, layout, scratch) as b:
        bandwidths = []
        for server in (a, b):  # a first run each, not counted: compilation, page faults, connections
            measure(server, driver, max(args.concurrency), max(args.concurrency), vocab_size)
            server.tpot_ms.clear(), server.ttft_ms.clear(), server.tokens_per_s.clear()
        for _ in range(args.rounds):
            bandwidths.append(memory_bandwidth())
            for concurrency in args.concurrency:
                for server in (a, b):
                    measure(server, driver, concurrency, args.requests * concurrency, vocab_size)
    return [row(layout, concurrency, a, b, checkpoint, bandwidths) for concurrency in args.concurrency]


def row(layout: str, concurrency: int, a: Server, b: Server, checkpoint: Path, bandwidths: list[float]) -> dict:
    spec = load_spec(checkpoint)
    read_bytes = 4 * (spec.num_parameters - (0 if spec.tie_word_embeddings else spec.parameters()["embedding"]))
    ours_ms = statistics.median(a.tpot_ms[concurrency])
    ratios = [y / x for x, y in zip(a.tpot_ms[concurrency], b.tpot_ms[concurrency], strict=True)]
    return {
        "layout": layout,
        "concurrency": concurrency,
        "labkit_tpot_ms": ours_ms,
        "vllm_tpot_ms": statistics.median(b.tpot_ms[concurrency]),
        "tpot_ratio": statistics.median(ratios),
        "tpot_ratio_range": [min(ratios), max(ratios)],
        "labkit_ttft_ms": statistics.median(a.ttft_ms[concurrency]),
        "vllm_ttft_ms": statistics.median(b.ttft_ms[concurrency]),
        "labkit_tokens_per_s": statistics.median(a.tokens_per_s[concurrency]),
        "vllm_tokens_per_s": statistics.median(b.tokens_per_s[concurrency]),
        "labkit_weight_gb_per_s": read_bytes / (ours_ms * 1e-3) / 1e9,
        "memory_gb_per_s": statistics.median(bandwidths) / 1e9,
        "aim_ratio": AIMS.get(layout),
        "aim_tpot_ms": AIM_TPOT_MS.get(concurrency),
    }


def show(rows: list[dict]) -> None:
    print(f"TPOT in ms, {PROMPT_TOKENS} tokens in, {OUTPUT_TOKENS} out, float32, medians; ratio: vLLM / labkit, paired")
    print(
        "layout  x clients   labkit   vLLM  ratio       (range)  aim    tokens/s     TTFT ms   weights of memory GB/s"
    )
    for r in rows:
        low, high = r["tpot_ratio_range"]
        print(
            f"{r['layout']:>6}  x {r['concurrency']:<8}{r['labkit_tpot_ms']:8.2f}{r['vllm_tpot_ms']:7.2f}"
            f"{r['tpot_ratio']:7.2f}  {f'({low:.2f}-{high:.2f})':>12} {r['aim_ratio'] or '':>4} "
            f"{r['labkit_tokens_per_s']:6.0f} /{r['vllm_tokens_per_s']:4.0f} "
            f"{r['labkit_ttft_ms']:6.0f} /{r['vllm_ttft_ms']:4.0f} "
            f"{r['labkit_weight_gb_per_s']:10.1f} of {r['memory_gb_per_s']:.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="the vllm executable of an environment that has it")
    parser.add_argument("--model", default="lab-30m")
    parser.add_argument("--layouts", nargs="+", default=["tp1", "tp2"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=6, help="requests of each concurrent client in a run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="labkit-vllm-") as name, DriverProcess() as driver:
        scratch, checkpoint = Path(name), Path(name) / args.model
        code = "import sys; from labkit.model.export import export_checkpoint as e; e(sys.argv[1], sys.argv[2])"
        subprocess.run([sys.executable, "-c", code, args.model, str(checkpoint)], check=True)
        rows = [row for layout in args.layouts for row in compare(layout, args, checkpoint, scratch, driver)]
    show(rows)
    print(json.dumps({"benchmark": "against_vllm", "model": args.model, "cores": usable_cores(), "rows": rows}))


if __name__ == "__main__":
    main()
