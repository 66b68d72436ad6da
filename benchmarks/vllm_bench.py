"""Our load client against `vllm bench serve`, turn about on one server: do they see the same TTFT and TPOT?

The server is started as `labkit run --engine vllm` starts it, without a prefix cache, since both clients send the same
prompts. Greedy, 512 tokens in and 64 out; both clients have the same place in the system's line for the cores. A round
is one run of either, and who goes first changes every round; with --together both run at once, each with the whole
load, so that whatever else the machine does is done to both. With --known-schedule both are held against the C server
that logs its own instants instead, which tells whose clock is true. The Python needs vLLM with its `bench` extra.
Prints a table, and one JSON line last.

    python benchmarks/vllm_bench.py --python PATH/TO/PYTHON/WITH/VLLM [--layouts tp1 tp2] [--loads 1 4 2/s] [--rounds 6]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from known_schedule import build, default_source, read_log, served
from paired import ratio_of_medians
from vllm_client import Figures, Load, ServerSide, VllmClient, ours

from labkit.cluster.engine_plan import SERVED_NAME, EnginePlan, find_engine
from labkit.cluster.engines import started
from labkit.cluster.topology import look_at_machine
from labkit.lab.engine_model import serve_model
from labkit.layout import Layout
from labkit.load.driver import DriverProcess
from labkit.load.spec import RunSpec
from labkit.load.target import Target
from labkit.plan.deploy import deploy_flags

OUTPUT_TOKENS, KNOWN_TOKENS = 64, 32
FIGURES = ("ttft_ms", "tpot_ms")
AIM = 0.05


class Side(NamedTuple):
    """One client's run. off: (2), ms, mean TTFT and TPOT minus the server's own."""

    figures: Figures
    lengths: list[int]
    off: Figures


class Pair:
    """Both clients, and where their files go."""

    def __init__(self, args: argparse.Namespace, driver: DriverProcess, scratch: Path) -> None:
        self.args, self.driver, self.folder = args, driver, args.keep or scratch
        driver.warm()
        model = serve_model(args.model, Layout())
        self.vocab_size = model.vocab_size
        beside = None if args.own_priority else driver.pid
        self.vllm = VllmClient(find_engine("vllm", args.python)[0], model.path, beside)

    def round(self, target: Target, load: Load, name: str, turn: int, dialect: dict) -> tuple[Figures, Figures]:
        """(2 clients, 2 figures, requests) and (2 clients, 2 figures), ours first: the figures, and the mean of each
        minus what the server itself says. SystemExit where they did not send the same prompts.
        """
        spec = self.spec(target, load, self.args.requests, OUTPUT_TOKENS)
        result, server = self.folder / f"{name}-{turn}.json", ServerSide(target.url)
        if self.args.together:
            found: list[Side] = []
            its = self.theirs(spec, load, dialect, result, server, lambda: found.append(self.ours(spec, server)))
            mine = found[0]
        elif turn % 2:
            its, mine = self.theirs(spec, load, dialect, result, server), self.ours(spec, server)
        else:
            mine, its = self.ours(spec, server), self.theirs(spec, load, dialect, result, server)
        if mine.lengths != its.lengths:
            raise SystemExit(f"The prompts differ: {mine.lengths[:5]} tokens of ours, {its.lengths[:5]} of theirs.")
        medians = np.median([mine.figures, its.figures], axis=2).round(3).tolist()
        note(f"{name} round {turn}, load average {os.getloadavg()[0]:.1f}: labkit {medians[0]}, vllm {medians[1]}")
        return np.array([mine.figures, its.figures]), np.array([mine.off, its.off])

    def ours(self, spec: RunSpec, server: ServerSide) -> Side:
        report, figures = ours(self.driver, spec, server.look)
        return Side(figures, [record.prompt_tokens for record in report.records], server.off(figures))

    def theirs(
        self, spec: RunSpec, load: Load, dialect: dict, result: Path, server: ServerSide,
        meanwhile: Callable[[], None] | None = None,
    ) -> Side:  # fmt: skip
        found, figures = self.vllm.run(spec, load, dialect, result, meanwhile or server.look)
        return Side(figures, found["input_lens"], server.off(figures))

    def spec(self, target: Target, load: Load, num_requests: int, output_tokens: int) -> RunSpec:
        run_id = f"pair-{time.monotonic_ns()}"
        return load.spec(
            num_requests, self.args.prompt_tokens, output_tokens,
            target=target, run_id=run_id, vocab_size=self.vocab_size,
        )  # fmt: skip


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def on_vllm(pair: Pair, layout: str, args: argparse.Namespace, scratch: Path) -> list[dict]:
    flags = deploy_flags("vllm", Layout.parse(layout))
    model, extra = serve_model(args.model, flags.layout), ["--no-enable-prefix-caching", *args.extra]
    program = find_engine("vllm", args.python)
    plan = EnginePlan("vllm", program, model.path, flags.flags, flags.layout.world_size, flags.environment, extra)
    rows = []
    with started(plan, look_at_machine(), scratch / f"{layout}.log") as server:
        target = Target(url=server.url, model=SERVED_NAME, prompt_mode="text")
        for load in args.loads:
            # not counted: page faults, the first shapes, and what the server takes
            report, _ = ours(pair.driver, pair.spec(target, load, 4, OUTPUT_TOKENS))
            name = f"vllm-{layout}-{str(load).replace(' ', '').replace('/', 'per')}"
            rounds = [pair.round(target, load, name, turn, report.options) for turn in range(args.rounds)]
            rows.append({"server": f"vLLM {layout}", "load": str(load), **summed_up(rounds, args.together)})
    return rows


def summed_up(rounds: Sequence[tuple[Figures, Figures]], together: bool) -> dict:
    """The server cannot tell the requests of two clients apart that ask at once: then `minus_server_ms` is None."""
    found: dict = {}
    for index, name in enumerate(FIGURES):
        figures = ratio_of_medians([both[:, index] for both, _ in rounds])
        off = None if together else np.median([off[:, index] for _, off in rounds], axis=0).tolist()
        found[name] = {**figures, "minus_server_ms": off, "within_aim": abs(figures["ratio"] - 1) <= AIM}
    return found


def on_known_schedule(pair: Pair, args: argparse.Namespace, scratch: Path) -> list[dict]:
    """What either says, minus what the server did, by request."""
    binary = build(args.known_schedule, scratch)
    rows = []
    for load in args.loads:
        off: dict[str, list[Figures]] = {"labkit": [], "vllm bench": []}
        for turn in range(args.rounds):
            for client in sorted(off, reverse=bool(turn % 2)):
                off[client].append(_off(pair, client, binary, load, scratch / f"known-{client[:4]}-{turn}.csv"))
        for client, rounds in off.items():
            pooled = np.concatenate(rounds, axis=1)
            figures = {name: _spread(pooled[index]) for index, name in enumerate(FIGURES)}
            rows.append({"server": "known schedule", "load": str(load), "client": client, **figures})
    return rows


def _off(pair: Pair, client: str, binary: Path, load: Load, log: Path) -> Figures:
    with served(binary, log, ()) as target:
        spec = pair.spec(target, load, pair.args.requests, KNOWN_TOKENS)
        if client == "labkit":
            _, figures = ours(pair.driver, spec)
        else:
            _, figures = pair.vllm.run(spec, load, {}, log.with_suffix(".json"))
    truths = read_log(log)[-spec.num_requests :]  # what vLLM's client tries a server with comes before them
    first = [(row.first_ns - row.received_ns) / 1e6 for row in truths]
    each = [(row.last_ns - row.first_ns) / 1e6 / (row.num_tokens - 1) for row in truths]
    return figures - np.array([first, each])


def _spread(values: Figures) -> dict[str, float]:
    return {f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 99)}


def show(rows: Sequence[dict]) -> None:
    print("medians, ms; minus the server's own: of the means, the median over rounds")
    print("server     load   figure     labkit  vllm bench   ratio  (95 % interval)  within 5 %  minus server")
    for row in rows:
        for name in FIGURES:
            f = row[name]
            (mine, its), (low, high) = f["medians"], f["interval"]
            print(
                f"{row['server']:<10} {row['load']:<6} {name} {mine:9.2f}  {its:10.2f}  {f['ratio']:6.3f}  "
                f"({low:.3f}-{high:.3f})  {'yes' if f['within_aim'] else 'NO':>10}  "
                + ("-" if f["minus_server_ms"] is None else "{:.2f} and {:.2f}".format(*f["minus_server_ms"]))
            )


def show_known(rows: Sequence[dict]) -> None:
    print("load    client      figure    what it says minus what the server did, ms:   p50      p90      p99")
    for row in rows:
        for name in FIGURES:
            f = row[name]
            print(f"{row['load']:<7} {row['client']:<11} {name} {f['p50']:48.3f} {f['p90']:8.3f} {f['p99']:8.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="", help="the Python that has vLLM; else LABKIT_VLLM_PYTHON")
    parser.add_argument("--model", default="lab-30m")
    parser.add_argument("--layouts", nargs="+", default=["tp1", "tp2"])
    parser.add_argument("--loads", nargs="+", type=Load.parse, default=[Load(1), Load(4)], help="clients, or N/s")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--prompt-tokens", type=int, default=512, help="a chat's; with few, a client's own ms show")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--together", action="store_true", help="both clients at once instead of by turns")
    parser.add_argument("--own-priority", action="store_true", help="leave vLLM's client the priority of a shell")
    parser.add_argument("--known-schedule", type=Path, nargs="?", const=default_source(), help="its server.c")
    parser.add_argument("--keep", type=Path, help="a folder for vLLM's own result files (labkit import reads them)")
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="last: more words for vllm serve")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="labkit-vllm-bench-") as folder, DriverProcess() as driver:
        scratch, pair = Path(folder), Pair(args, driver, Path(folder))
        if args.known_schedule:
            rows = on_known_schedule(pair, args, scratch)
        else:
            rows = [row for layout in args.layouts for row in on_vllm(pair, layout, args, scratch)]
    (show_known if args.known_schedule else show)(rows)
    print(json.dumps({"benchmark": "vllm_bench", "model": args.model, "rows": rows}))


if __name__ == "__main__":
    main()
