"""Our load client against `vllm bench serve`, turn about on one vLLM server: do they see the same TTFT and TPOT?

The server is started as `labkit run --engine vllm` starts it. Closed loop, greedy, 128 tokens in and 64 out, every
prompt new; each round is one run of either client, and the ratio of their medians is taken round by round, so that a
machine whose speed drifts drifts for both. Prints a table, and one JSON line last.

    python benchmarks/vllm_bench.py --python PATH/TO/PYTHON/WITH/VLLM [--layouts tp1 tp2] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from labkit.cluster.engine_plan import SERVED_NAME, EnginePlan, find_engine
from labkit.cluster.engines import EngineServer, started
from labkit.cluster.topology import look_at_machine
from labkit.lab.engine_model import serve_model
from labkit.layout import Layout
from labkit.load.driver import DriverProcess
from labkit.load.lengths import Lengths
from labkit.load.spec import RunSpec
from labkit.load.target import Target
from labkit.load.workload import Part, Workload
from labkit.measure.metrics import tpot_ms, ttft_ms
from labkit.plan.deploy import deploy_flags

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
WORKLOAD = Workload(
    name="pair",
    title="128 tokens in, 64 out",
    parts=(Part(Lengths("constant", tokens=PROMPT_TOKENS), Lengths("constant", tokens=OUTPUT_TOKENS)),),
)
AIM = 0.05
Figures = dict[str, float]


def ours(
    server: EngineServer, driver: DriverProcess, args: argparse.Namespace, vocab_size: int, num: int = 0
) -> Figures:
    spec = RunSpec(
        target=Target(url=server.url, model=SERVED_NAME), run_id=f"pair-{time.monotonic_ns()}", workload=WORKLOAD,
        num_requests=num or args.requests, concurrency=args.concurrency, vocab_size=vocab_size,
    )  # fmt: skip
    records = driver.run(spec).records
    if bad := [record for record in records if record.status != "completed" or record.n != OUTPUT_TOKENS]:
        raise SystemExit(f"{len(bad)} of {len(records)} requests went wrong: {bad[0].error or bad[0]}")
    return {
        "ttft_ms": statistics.median(value for record in records if (value := ttft_ms(record)) is not None),
        "tpot_ms": statistics.median(value for record in records if (value := tpot_ms(record)) is not None),
        "prompt_tokens": statistics.mean(record.prompt_tokens for record in records),
    }


def theirs(
    server: EngineServer, program: str, args: argparse.Namespace, model: str, scratch: Path, seed: int
) -> Figures:
    result = (args.keep or scratch) / f"vllm-{server.plan.num_ranks}-ranks-{seed}.json"
    command = [
        program, "bench", "serve", "--base-url", server.url, "--endpoint", "/v1/completions", "--model", SERVED_NAME,
        "--tokenizer", model, "--dataset-name", "random", "--random-input-len", str(PROMPT_TOKENS),
        "--random-output-len", str(OUTPUT_TOKENS), "--num-prompts", str(args.requests), "--max-concurrency",
        str(args.concurrency), "--ignore-eos", "--temperature", "0", "--seed", str(seed), "--disable-tqdm",
        "--save-result", "--save-detailed", "--result-filename", str(result),
    ]  # fmt: skip
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode or not result.exists():
        raise SystemExit(f"vllm bench serve ended with {made.returncode}:\n{made.stdout[-1500:]}{made.stderr[-1500:]}")
    found = json.loads(result.read_text())
    return {
        "ttft_ms": found["median_ttft_ms"],
        "tpot_ms": found["median_tpot_ms"],
        "prompt_tokens": found["total_input_tokens"] / found["completed"],
    }


def compare(layout: str, args: argparse.Namespace, scratch: Path, driver: DriverProcess) -> dict:
    flags = deploy_flags("vllm", Layout.parse(layout))
    model, program = serve_model(args.model, flags.layout), find_engine("vllm", args.python)
    plan = EnginePlan("vllm", program, model.path, flags.flags, flags.layout.world_size, flags.environment, args.extra)
    rounds: list[tuple[Figures, Figures]] = []
    with started(plan, look_at_machine(), scratch / f"{layout}.log") as server:
        ours(server, driver, args, model.vocab_size, 4)  # not counted: page faults, connections, the first shapes
        for index in range(args.rounds):
            a = ours(server, driver, args, model.vocab_size)
            b = theirs(server, program[0], args, model.path, scratch, index)
            rounds.append((a, b))
            print(f"{layout} round {index}: labkit {a}, vllm bench {b}", file=sys.stderr, flush=True)
    return {"layout": layout, **summed_up(rounds)}


def summed_up(rounds: Sequence[tuple[Figures, Figures]]) -> dict:
    found: dict = {"prompt_tokens": [rounds[0][0]["prompt_tokens"], rounds[0][1]["prompt_tokens"]]}
    for name in ("ttft_ms", "tpot_ms"):
        ratios = [a[name] / b[name] for a, b in rounds]
        found[name] = {
            "labkit": statistics.median(a[name] for a, _ in rounds),
            "vllm_bench": statistics.median(b[name] for _, b in rounds),
            "ratio": statistics.median(ratios),
            "ratio_range": [min(ratios), max(ratios)],
            "within_aim": abs(statistics.median(ratios) - 1) <= AIM,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="", help="the Python that has vLLM; else LABKIT_VLLM_PYTHON")
    parser.add_argument("--model", default="lab-30m")
    parser.add_argument("--layouts", nargs="+", default=["tp1", "tp2"])
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="a folder for vLLM's own result files (labkit import reads them)")
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="last: more words for vllm serve")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="labkit-vllm-bench-") as name, DriverProcess() as driver:
        rows = [compare(layout, args, Path(name), driver) for layout in args.layouts]
    print("layout  figure    labkit  vllm bench   ratio       (range)  medians, ms")
    for row in rows:
        for figure in ("ttft_ms", "tpot_ms"):
            f = row[figure]
            low, high = f["ratio_range"]
            print(
                f"{row['layout']:>6}  {figure}  {f['labkit']:7.2f}  {f['vllm_bench']:10.2f}  {f['ratio']:6.3f}  "
                f"({low:.3f}-{high:.3f})"
            )
    print(json.dumps({"benchmark": "vllm_bench", "model": args.model, "concurrency": args.concurrency, "rows": rows}))


if __name__ == "__main__":
    main()
