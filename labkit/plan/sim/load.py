"""What is asked of a simulated server: a workload or a trace as lengths and instants, or a fixed pair of lengths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from labkit.load.lengths import Lengths
from labkit.load.schedule import Outline, outline
from labkit.load.trace import trace_outline
from labkit.load.workload import Part, Workload, load_workload
from labkit.plan.demand import two_numbers
from labkit.plan.sim.request import SimRequest

NUM_REQUESTS = 1000


def as_requests(outlines: Sequence[Outline]) -> list[SimRequest]:
    return [
        SimRequest(each.at_s, each.prompt_tokens, each.output_tokens, each.block_ids, each.block_tokens or 1)
        for each in outlines
    ]


def workload_requests(
    workload: str, *, num_requests: int | None = None, rate: float | None = None, seed: int | None = None,
    length_scale: float = 1.0, max_context: int | None = None,
) -> list[SimRequest]:  # fmt: skip
    """A shipped workload by name, a TOML file, or `8192/1024`: prompt and answer tokens, all alike, Poisson arrivals.

    Without num_requests: the workload's own number, or a thousand.
    """
    pair = two_numbers(workload)
    given = _fixed(workload, *pair) if pair else load_workload(workload)
    count = given.num_requests or NUM_REQUESTS if num_requests is None else num_requests
    if given.generator == "small-engines":
        count = min(count, given.num_requests)
    return as_requests(outline(given, count, rate, seed, length_scale, max_context))


def _fixed(text: str, prompt: int, output: int) -> Workload:
    part = Part(Lengths("constant", tokens=prompt), Lengths("constant", tokens=output))
    return Workload(name=text, title=text, parts=(part,))


def trace_requests(
    path: str | Path, *, num_requests: int | None = None, rate: float | None = None, seconds: float | None = None,
    length_scale: float = 1.0, time_scale: float = 1.0, max_context: int | None = None,
) -> list[SimRequest]:  # fmt: skip
    """A public trace (Azure, BurstGPT, Mooncake) at its own arrivals; its prefix blocks come along."""
    return as_requests(
        trace_outline(
            path, 0.0, seconds, num_requests, time_scale, rate, length_scale=length_scale, max_context=max_context
        )
    )  # fmt: skip
