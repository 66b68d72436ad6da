"""Our planner beside another on this machine: the same question in turn, what either takes, and what it answers.

The peer is NVIDIA's aiconfigurator, in a venv of its own (`pip install aiconfigurator==0.12.0`; its wheel carries its
measurements of kernels, so nothing else is fetched):

    python benchmarks/beside_peers.py --python PEER_VENV/bin/python [--rounds 2] [--rows 8] [--write]

Asked is one model on one node under two limits, as a whole process each; then measured servings, row by row, ours by a
fit that has seen no row of that model. --write keeps what it found in docs/beside_peers.md.

Others, on 1 December 2026. vidur 0.0.26 (a simulator) was looked into and not installed: its wheel has no profile of
any GPU, it takes them from a model hub when it starts, and the machine reached none. LLMServingSim, splitwise-sim,
llm-d-inference-sim, LLMCompass and ServeGen are not in PyPI's list, and the calculon there is another program.
genz-llm 0.0.16 and llm-analysis 0.2.2 are there and were not timed: by their own words they compute the times of one
configuration.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from labkit.paths import repo_dir
from labkit.plan.fit_serving import Fitter, Sample
from labkit.plan.predict_rows import predict_row
from labkit.plan.row_rules import load_rows

DATA = Path(os.environ.get("LABKIT_SHARED_DATA", repo_dir().parent / "shared" / "data"))
TOKENS, TTFT_MS, TPOT_MS, NUM_GPUS = 1024, 1000, 50, 8
IN_FLIGHT = 576
"""As many as the peer's own answer has in flight, so that ours is held against the same load."""
MODEL, ENGINE = "llama-3.1-70b", "vllm"
CHECKPOINT = "nvidia/Llama-3.1-70B-Instruct-FP8"
PEER_ASKED = [
    "cli", "default", "--model-path", "meta-llama/Meta-Llama-3.1-70B", "--system", "h200_sxm", "--backend", ENGINE,
    "--total-gpus", str(NUM_GPUS), "--isl", str(TOKENS), "--osl", str(TOKENS), "--ttft", str(TTFT_MS), "--tpot",
    str(TPOT_MS), "--no-color", "--save-dir",
]  # fmt: skip
OURS_ASKED = [
    "-m", "labkit.cli", "plan", "--model", MODEL, "--gpus", f"{NUM_GPUS}xh200", "--workload", f"{TOKENS}/{TOKENS}",
    "--concurrency", str(IN_FLIGHT), "--ttft-p95-ms", str(TTFT_MS), "--tpot-p95-ms", str(TPOT_MS), "--percentile",
    "mean", "--engine", ENGINE, "--json",
]  # fmt: skip


@dataclass(frozen=True)
class Took:
    wall_s: float
    cpu_s: float


def timed(words: Sequence[str], stdin: str = "") -> tuple[Took, str]:
    """A whole process, imports and all. Raises CalledProcessError with what it said."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, check=False)
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(words[:4])} … ended with {done.returncode}: {done.stderr[-800:]}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Took(wall_s, cpu_s), done.stdout


def ask_peer(python: str) -> tuple[Took, list[dict[str, str]]]:
    """Its first choice without and with prefill apart."""
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(python).with_name("aiconfigurator"))
        took, _ = timed([python, "-W", "ignore", program, *PEER_ASKED, folder])
        found = []
        for file in sorted(Path(folder).rglob("best_config_topn.csv")):
            with file.open(newline="", encoding="utf-8") as lines:
                found.append({"mode": file.parent.name, **next(csv.DictReader(lines))})
    return took, found


def ask_ours() -> tuple[Took, dict[str, Any]]:
    took, text = timed([sys.executable, *OURS_ASKED])
    return took, json.loads(text)


def in_turn(python: str, rounds: int) -> tuple[list[Took], list[Took], list[dict[str, str]], dict[str, Any]]:
    theirs, ours = [], []
    for turn in range(rounds):
        took, peer = ask_peer(python)
        theirs.append(took)
        took, plan = ask_ours()
        ours.append(took)
        print(f"round {turn + 1}: peer {theirs[-1]}, labkit {ours[-1]}", file=sys.stderr, flush=True)
    return theirs, ours, peer, plan


# ---- measured rows


@dataclass(frozen=True)
class Compared:
    sample: Sample
    theirs: dict[str, Any]
    ttft_s: float
    tpot_s: float
    seconds: float
    """Ours for the row, of processor time."""


def compare_rows(python: str, number: int) -> tuple[str, list[Compared]]:
    """Rows of the file from end to end, evenly; the peer's version."""
    samples, _ = load_rows(DATA / "measured" / "serving_hopper.csv")
    fitter = Fitter(samples)
    loop = fitter.predict(fitter.constants(fitter.fit(np.array([float(s.row.model != MODEL) for s in samples]))))
    mine = [at for at, s in enumerate(samples) if (s.row.model, s.row.engine) == (MODEL, ENGINE) and s.ttft_counts]
    chosen = [mine[at] for at in np.linspace(0, len(mine) - 1, min(number, len(mine))).round().astype(int)]
    asked = [
        {"model_path": CHECKPOINT, "system_name": f"{row.hardware.device.name}_sxm", "backend_name": ENGINE,
         "isl": round(row.prompt), "osl": round(row.output), "batch_size": round(row.concurrency),
         "tp_size": row.layout.tp, "pp_size": row.layout.pp}
        for row in (samples[at].row for at in chosen)
    ]  # fmt: skip
    program = str(Path(__file__).with_name("peer_aiconfigurator.py"))
    _, text = timed([python, "-W", "ignore", program], json.dumps({"rows": asked}))
    answer = json.loads(text.strip().splitlines()[-1])
    found = []
    for at, theirs in zip(chosen, answer["rows"], strict=True):
        began = time.process_time()
        predict_row(samples[at].row)
        took = time.process_time() - began
        found.append(Compared(samples[at], theirs, float(loop.ttft_s[at]), float(loop.tpot_s[at]), took))
    return answer["version"], found


# ---- telling it


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def times(name: str, took: Sequence[Took]) -> list[str]:
    cpu, wall = [each.cpu_s for each in took], [each.wall_s for each in took]
    return [name, f"{min(cpu):.1f}", f"{max(cpu):.1f}", f"{min(wall):.1f}", f"{max(wall):.1f}"]


def answers(peer: list[dict[str, str]], plan: dict[str, Any]) -> str:
    rows = []
    for one in peer:
        if one["mode"] == "agg":
            replicas = NUM_GPUS // int(one["num_total_gpus"])
            rows.append(["aiconfigurator", f"TP{one['tp']} × {replicas}", NUM_GPUS, f"{float(one['ttft']):.0f}",
                         f"{float(one['tpot']):.1f}", f"{float(one['tokens/s/gpu']):,.0f}"])  # fmt: skip
            rows += [_ours(row, "labkit, the same layout") for row in plan["layouts"]
                     if row["layout"] == f"dp{replicas}xtp{one['tp']}" and row["predictions"]]  # fmt: skip
    if plan["chosen"]:
        rows.append(_ours(plan["chosen"], "labkit's choice"))
    found = table(["", "layout", "GPUs", "TTFT, ms", "TPOT, ms", "tokens/s a GPU"], rows)
    return found if plan["chosen"] else f"{found}\n\nlabkit chooses none at that load: {plan['infeasible']['sentence']}"


def _ours(row: dict[str, Any], name: str) -> list[object]:
    figures = row["predictions"]
    ttft, tpot = figures["ttft_ms"]["mean"], figures["tpot_ms"]["mean"]
    ttft_text, tpot_text = ("–" if value is None else f"{value:.{digits}f}" for value, digits in ((ttft, 0), (tpot, 1)))
    return [name, row["name"], row["num_gpus"], ttft_text, tpot_text, f"{row['tokens_per_gpu']:,.0f}"]


def measured_rows(found: Sequence[Compared]) -> str:
    rows, errors = [], []
    for one in found:
        row, sample = one.sample.row, one.sample
        head = [f"{row.hardware.device.name} {row.layout}", f"{row.prompt:.0f} + {row.output:.0f}",
                f"{row.concurrency:.0f}"]  # fmt: skip
        ms = [sample.ttft_s * 1e3, sample.tpot_s * 1e3, one.ttft_s * 1e3, one.tpot_s * 1e3]
        if "refused" in one.theirs:
            rows.append([*head, *(f"{value:.1f}" for value in ms[:2]), "refused", "", *(f"{v:.1f}" for v in ms[2:])])
            continue
        theirs = [one.theirs["ttft_ms"], one.theirs["tpot_ms"]]
        rows.append([*head, *(f"{value:.1f}" for value in (*ms[:2], *theirs, *ms[2:]))])
        errors.append([guess / ms[at % 2] - 1 for at, guess in enumerate((*theirs, *ms[2:]))])
    mean = np.abs(errors).mean(axis=0)
    rows.append(["mean absolute error", "", "", "", "", *(f"{value:.1%}" for value in mean)])
    return table(["GPU, layout", "tokens", "in flight", "TTFT", "TPOT", "theirs: TTFT", "TPOT", "ours: TTFT", "TPOT"],
                 rows)  # fmt: skip


def document(python: str, rounds: int, number: int) -> str:
    load = os.getloadavg()[0]
    theirs, ours, peer, plan = in_turn(python, rounds)
    version, found = compare_rows(python, number)
    seconds = [[one.theirs["seconds"] for one in found[1:]], [one.seconds for one in found[1:]]]
    data = next(one.theirs["data"] for one in found if "data" in one.theirs)
    return "\n\n".join([
        "# Beside another planner, on the same machine",
        "<!-- written by benchmarks/beside_peers.py --write; run it again rather than edit this -->",
        f"aiconfigurator {version} and `labkit plan`, in turn, {rounds} rounds, on {os.cpu_count()} cores (load "
        f"average {load:.1f} before; where others use the cores, processor time is what to compare). Asked: "
        f"Llama-3.1-70B in bfloat16 on {NUM_GPUS} H200, vLLM, {TOKENS} + {TOKENS} tokens, TTFT at most {TTFT_MS} ms, "
        f"TPOT at most {TPOT_MS} ms, on average. The peer looks for the most tokens a GPU at whatever load gives them, "
        f"with and without prefill apart; labkit for the smallest layout that serves {IN_FLIGHT} requests in flight, "
        "which is the load of the peer's answer, and has the simulator look at it.",
        table(["whole process, s", "processor, least", "most", "wall, least", "most"],
              [times("aiconfigurator", theirs), times("labkit", ours)]),
        f"Processor time, the least of either: {min(t.cpu_s for t in theirs) / min(t.cpu_s for t in ours):.1f} times "
        "as long.",
        "## What each answers", answers(peer, plan),
        "## Measured rows",
        f"Llama-3.1-70B in FP8 on vLLM, {len(found)} rows from end to end of those in `serving_hopper.csv` that are "
        f"compared; ms. Theirs by its data of vLLM {data} (the rows' own versions are older and not in it) and its "
        f"defaults for {CHECKPOINT}, ours by a fit that has seen no row of the model. A row takes it "
        f"{np.median(seconds[0]):.1f} s of processor time, and us "
        f"{np.median(seconds[1]) * 1e3:.1f} ms (medians, the first left out).",
        measured_rows(found),
    ]) + "\n"  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="of the venv that has aiconfigurator")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--write", action="store_true", help="keep it in docs/beside_peers.md")
    options = parser.parse_args()
    if not Path(options.python).with_name("aiconfigurator").is_file():
        sys.exit(f"There is no aiconfigurator beside {options.python}: install it there (pip install aiconfigurator).")
    text = document(options.python, options.rounds, options.rows)
    print(text)
    if options.write:
        (repo_dir() / "docs" / "beside_peers.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
