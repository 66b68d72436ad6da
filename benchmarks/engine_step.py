"""Our engine's step against transformers' generate, on the same weights and threads, turn by turn.

A step reads every weight once, so at small batches its floor is bytes ÷ bandwidth; the machine's own
bandwidth is measured first, and what each engine achieves stands beside it. The two take turns, so that a
busy neighbour hits both; the median of the turns is reported. Prints a table, and one JSON line last.

python benchmarks/engine_step.py [--model lab-30m] [--threads 2] [--batches 1 8] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Threads that wait a little before they sleep: the engine's ranks are started so as well. Read once, by libgomp.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import numpy as np
import torch

from labkit.engine.messages import AllocateKV, Configure, SampleSpec, Step
from labkit.engine.runner import Runner
from labkit.model.export import export_checkpoint
from labkit.model.spec import load_spec
from labkit.parallel.mesh import single_rank_mesh

BLOCK_SIZE, CONTEXT, NUM_NEW = 16, 144, 32
"""Context in the middle of a run: 160 tokens."""


def median_s(run: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def bandwidth(num_bytes: int = 256 << 20) -> dict[str, float]:
    """GB/s of a plain read (a sum) and of a copy (bytes read plus bytes written), with torch's threads."""
    source = torch.ones(num_bytes // 4)
    target = torch.empty_like(source)
    target.copy_(source)
    return {
        "read_gb_s": num_bytes / min(median_s(source.sum, 3) for _ in range(3)) / 1e9,
        "copy_gb_s": 2 * num_bytes / min(median_s(lambda: target.copy_(source), 3) for _ in range(3)) / 1e9,
    }


def ints(values: Any) -> bytes:
    return np.asarray(values, dtype="<i4").tobytes()


class Ours:
    """One rank under TP1, driven by step messages as the engine drives it."""

    def __init__(self, folder: Path, threads: int, memory_bytes: int) -> None:
        self.runner = Runner(0, lambda message: single_rank_mesh(), torch.device("cpu"))
        message = Configure(
            1, "tp1", str(folder), 0, "float32", memory_bytes, BLOCK_SIZE, 512, 64, threads, "shm", True, False
        )
        configured = self.runner.configure(message)
        if configured.error:
            sys.exit(configured.error)
        self.weights_bytes = configured.memory.weights
        self.runner.allocate(AllocateKV(1, configured.num_blocks))

    def step(self, tokens: list[list[int]], context: int) -> tuple[list[int], float]:
        """One step of equally long sequences: the sampled tokens and the seconds it took."""
        batch, length = len(tokens), len(tokens[0])
        width = -(-(CONTEXT + NUM_NEW) // BLOCK_SIZE)
        used = -(-(context + length) // BLOCK_SIZE)
        tables = np.arange(batch * width).reshape(batch, width)[:, :used]
        message = Step(
            1,
            1,
            ints(np.concatenate(tokens)),
            ints([length] * batch),
            ints([context] * batch),
            ints(tables.ravel()),
            [SampleSpec(i) for i in range(batch)],
            batch if length > 1 else 0,
        )
        sampled, start_ns, end_ns = self.runner.step(message)
        assert sampled is not None
        return sampled.token_ids, (end_ns - start_ns) / 1e9

    def generate(self, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
        """Greedy continuations, and the mean seconds of a decode step."""
        ids, _ = self.step(prompts, 0)
        out, total_s = [ids], 0.0
        for i in range(NUM_NEW - 1):
            ids, took_s = self.step([[token] for token in ids], CONTEXT + i)
            out.append(ids)
            total_s += took_s
        return np.array(out).T.tolist(), total_s / (NUM_NEW - 1)

    def prefill_ms(self, length: int, rounds: int) -> float:
        """Median of one prompt of `length` tokens; blocks are taken from the start of the pool."""
        rng = np.random.default_rng(0)
        blocks = ints(range(-(-length // BLOCK_SIZE)))
        times = []
        for _ in range(rounds):
            tokens = ints(rng.integers(300, size=length))
            message = Step(1, 1, tokens, ints([length]), ints([0]), blocks, [SampleSpec(0)], 1)
            _, start_ns, end_ns = self.runner.step(message)
            times.append((end_ns - start_ns) / 1e6)
        return statistics.median(times)


class Theirs:
    """transformers' generate, greedy; a decode step is the time of NUM_NEW tokens less that of one."""

    def __init__(self, folder: Path) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], count: int) -> torch.Tensor:
        ids = torch.tensor(prompts)
        return self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[:, ids.shape[1] :]

    def generate(self, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
        began = time.perf_counter()
        self._generate(prompts, 1)
        first_s = time.perf_counter() - began
        began = time.perf_counter()
        out = self._generate(prompts, NUM_NEW)
        return out.tolist(), (time.perf_counter() - began - first_s) / (NUM_NEW - 1)


def compare(ours: Ours, theirs: Theirs, batch: int, vocab_size: int, rounds: int) -> dict[str, Any]:
    rng = np.random.default_rng(batch)
    prompts = rng.integers(min(256, vocab_size), size=(batch, CONTEXT)).tolist()
    ours.generate(prompts)
    theirs.generate(prompts)
    steps: dict[str, list[float]] = {"ours": [], "transformers": []}
    for _ in range(rounds):
        mine, step_s = ours.generate(prompts)
        steps["ours"].append(step_s)
        other, step_s = theirs.generate(prompts)
        steps["transformers"].append(step_s)
    own_s, other_s = (statistics.median(times) for times in steps.values())
    return {
        "batch": batch,
        "ours_ms": own_s * 1e3,
        "transformers_ms": other_s * 1e3,
        "ours_best_ms": min(steps["ours"]) * 1e3,
        "transformers_best_ms": min(steps["transformers"]) * 1e3,
        "ours_tokens_per_s": batch / own_s,
        "transformers_tokens_per_s": batch / other_s,
        "ratio": statistics.median(b / a for a, b in zip(*steps.values(), strict=True)),
        "same_tokens": mine == other,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lab-30m")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory-mib", type=int, default=1024)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    spec = load_spec(options.model)
    with tempfile.TemporaryDirectory() as scratch:
        folder = export_checkpoint(options.model, Path(scratch) / spec.name)
        ours, theirs = Ours(folder, options.threads, options.memory_mib << 20), Theirs(folder)
        machine = bandwidth()
        rows = [compare(ours, theirs, batch, spec.vocab_size, options.rounds) for batch in options.batches]
    report(spec.name, spec.num_parameters * 4, machine, rows, ours, options)


def report(
    name: str, read_bytes: int, machine: dict[str, float], rows: list[dict[str, Any]], ours: Ours, options: Any
) -> None:
    """read_bytes: weights that a decode step reads (a tied embedding once, as the head)."""
    floor_ms = read_bytes / machine["read_gb_s"] / 1e6
    print(
        f"{name}, float32, {options.threads} threads, context {CONTEXT}–{CONTEXT + NUM_NEW}. A step reads "
        f"{read_bytes / 1e6:.0f} MB; this machine reads {machine['read_gb_s']:.1f} GB/s (copies "
        f"{machine['copy_gb_s']:.1f}): at least {floor_ms:.1f} ms."
    )
    print(f"{'batch':>6}{'ours ms':>10}{'best':>8}{'GB/s':>7}{'transformers ms':>17}{'best':>8}{'ratio':>8}{'same':>7}")
    for row in rows:
        row["gb_s"] = read_bytes / row["ours_ms"] / 1e6
        row["transformers_gb_s"] = read_bytes / row["transformers_ms"] / 1e6
        print(
            f"{row['batch']:>6}{row['ours_ms']:>10.2f}{row['ours_best_ms']:>8.2f}{row['gb_s']:>7.1f}"
            f"{row['transformers_ms']:>17.2f}{row['transformers_best_ms']:>8.2f}{row['ratio']:>8.2f}"
            f"{'yes' if row['same_tokens'] else 'NO':>7}"
        )
    prefill = {str(length): ours.prefill_ms(length, options.rounds) for length in (128, 1024)}
    print("prefill: " + ", ".join(f"{length} tokens {ms:.0f} ms" for length, ms in prefill.items()))
    result = {"model": name, "threads": options.threads, "read_bytes": read_bytes, "floor_ms": floor_ms}
    print(json.dumps({**result, "machine": machine, "steps": rows, "prefill_ms": prefill}))


if __name__ == "__main__":
    main()
