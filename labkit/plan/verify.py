"""The load test that checks a prediction on a running server: ours, and vLLM's own beside it.

Both send the predicted load and judge by the objective. As many requests are asked for as leave ten beyond the
percentile that is judged, because fewer say little about it (labkit greys such a percentile).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from importlib.metadata import version
from typing import Protocol

from labkit.plan.command_text import command_text, file_text
from labkit.plan.engine_flags import VERSIONS
from labkit.said import say

BEYOND = 10
FEWEST = 100
_TWO_NUMBERS = re.compile(r"(\d+)\s*/\s*(\d+)")


class Traffic(Protocol):
    """What of a workload a load test needs (`labkit.plan.demand.Demand`, or anything alike)."""

    @property
    def name(self) -> str: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def rate(self) -> float | None: ...
    @property
    def concurrency(self) -> int | None: ...


class Limits(Protocol):
    """Milliseconds, None: not asked."""

    @property
    def ttft_ms(self) -> float | None: ...
    @property
    def tpot_ms(self) -> float | None: ...


def load_tests(
    served: str, traffic: Traffic, limits: Limits | None, asked: str, url: str
) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """(whose command, version, text, notes) of each test."""
    number = _enough(getattr(limits, "percentile", "p95"), traffic.concurrency)
    yield "labkit", version("labkit"), _ours(served, traffic, limits, asked or traffic.name, url, number), ()
    text = _vllm_bench(served, traffic, limits, url, number)
    if _TWO_NUMBERS.fullmatch(traffic.name):
        yield "vllm", VERSIONS["vllm"], text, ()
        return
    note = say(
        "All requests {prompt} tokens in and {answer} out, the means: percentiles differ from those of the workload, "
        "whose lengths vary.", prompt=traffic.prompt_tokens, answer=traffic.output_tokens,
    )  # fmt: skip
    yield "vllm", VERSIONS["vllm"], text, (note,)


def _enough(percentile: str, concurrency: int | None) -> int:
    beyond = BEYOND / (1 - float(percentile.removeprefix("p")) / 100)
    return max(FEWEST, math.ceil(round(beyond, 6)), 4 * (concurrency or 0))


def _ours(served: str, traffic: Traffic, limits: Limits | None, asked: str, url: str, number: int) -> str:
    before, lengths = "", ["--workload", asked]
    if match := _TWO_NUMBERS.fullmatch(asked.strip()):
        before = file_text("verify.toml", _workload_text(int(match[1]), int(match[2])))
        lengths = ["--workload", "verify.toml"]
    elif asked.endswith((".csv", ".jsonl")):
        lengths = ["--trace", asked]
    load = _load(traffic, "--concurrency", "--rate")
    if lengths[0] == "--trace" and not traffic.concurrency:
        load = []  # a trace has its own arrivals
    wanted = ",".join(f"{name}={value:g}" for name, value in _limits(limits))
    objective = ["--objective", wanted] if wanted else []
    words = ["--server", url, "--model", served, *lengths, *load, "--num-requests", str(number), *objective]
    return before + command_text(["labkit", "run"], words)


def _workload_text(prompt: int, output: int) -> str:
    def lengths(tokens: int) -> str:
        return f'shape = "constant"\ntokens = {tokens}\n'

    return (
        f'name = "verify"\ntitle = "{prompt} in, {output} out"\n\n[[parts]]\n\n'
        f"[parts.prompt_tokens]\n{lengths(prompt)}\n"
        f"[parts.output_tokens]\n{lengths(output)}"
    )


def _vllm_bench(served: str, traffic: Traffic, limits: Limits | None, url: str, number: int) -> str:
    goodput = [f"{name}:{value:g}" for name, value in _limits(limits)]
    words = [
        *("--base-url", url, "--model", served, "--dataset-name", "random"),
        *("--random-input-len", str(traffic.prompt_tokens), "--random-output-len", str(traffic.output_tokens)),
        *("--ignore-eos", "--num-prompts", str(number)),
        *_load(traffic, "--max-concurrency", "--request-rate"),
        *("--percentile-metrics", "ttft,tpot", "--metric-percentiles", "50,95,99"),
        *(["--goodput", *goodput] if goodput else []),
    ]
    return command_text(["vllm", "bench", "serve"], words)


def _load(traffic: Traffic, closed: str, opened: str) -> list[str]:
    if traffic.concurrency is not None:
        return [closed, str(traffic.concurrency)]
    return [opened, f"{traffic.rate:g}"] if traffic.rate is not None else []


def _limits(limits: Limits | None) -> list[tuple[str, float]]:
    named = [("ttft", limits.ttft_ms), ("tpot", limits.tpot_ms)] if limits else []
    return [(name, value) for name, value in named if value is not None]
