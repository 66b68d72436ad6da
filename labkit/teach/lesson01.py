"""Lesson 01: data parallelism. Replicas divide requests, not a request; the router and admission decide the rest.

The exercise is a router's estimate of delay, which weighs a warm cache against a queue.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

from labkit.engine.router import ReplicaView, delay_tokens
from labkit.lab import Run
from labkit.load.lengths import Lengths
from labkit.load.schedule import make_schedule
from labkit.load.workload import Part, Workload, load_workload
from labkit.measure.metrics import counted
from labkit.teach.checks import Check, Problem, show_check
from labkit.teach.html import Table
from labkit.teach.readings import completed_per_s
from labkit.teach.reference import ReferenceCase

__all__ = ["GROWING", "best_cached_tokens", "cached_tokens", "check_delay", "completed_per_s", "delay"]

GROWING = Workload(
    name="growing",
    title="Short prompts whose answers are longer than they are",
    parts=(
        Part(
            prompt_tokens=Lengths("uniform", min_tokens=60, max_tokens=80),
            output_tokens=Lengths("uniform", min_tokens=100, max_tokens=130),
        ),
    ),
)
"""A sequence starts small and doubles: what is admitted by its prompt alone does not fit later."""


def best_cached_tokens(workload: str, num_requests: int, seed: int = 0) -> int:
    """Prompt tokens that a cache could serve at best: every request but the first of its prefix.

    One cache that forgets nothing and hears of every prefix in time.
    """
    loaded = load_workload(workload)
    schedule = make_schedule(loaded, num_requests=num_requests, seed=seed, rate=1.0)
    prefixes = [request.prefix_id for request in schedule.requests]
    sharing = loaded.parts[0].sharing
    return (len(prefixes) - len(set(prefixes))) * (sharing.prefix_tokens if sharing else 0)


def budget_for(case: ReferenceCase, run: Run, num_tokens: int) -> int:
    """Bytes a rank: the weights as `run` measured them, KV for `num_tokens`, and the block that pads batches."""
    rank = run.summary["memory_bytes"][0]
    per_token = case.kv_bytes_per_token(run.summary["layout"])
    return rank["weights"] + (num_tokens + case.settings()["block_size"]) * per_token


def least_preemptions(run: Run, num_tokens: int) -> int:
    """How many must leave a cache of `num_tokens` at least once, if all enter that fit by their prompts.

    Before the shortest answer is complete nobody has left of himself, and everybody has grown by its length; of
    those inside only so many fit that their sum does.
    """
    first = run.records[: run.summary["concurrency"]]
    prompts = [record.prompt_tokens for record in first]
    grown = min(record.n for record in first) - 1
    inside = _num_that_fit([prompt + 1 for prompt in prompts], num_tokens)
    return max(0, inside - _num_that_fit(sorted(prompt + grown for prompt in prompts), num_tokens))


def _num_that_fit(sizes: list[int], room: int) -> int:
    return sum(total <= room for total in itertools.accumulate(sizes))


def served_by(run: Run) -> dict[int, int]:
    """Replica → requests."""
    found = [record.server.replica for record in run.records if record.server]
    return {replica: found.count(replica) for replica in sorted(set(found))}


def cached_tokens(run: Run) -> int:
    return sum(record.cached_tokens for record in run.records)


def num_preemptions(run: Run) -> int:
    return sum(record.server.num_preemptions for record in run.records if record.server)


def overlap(run: Run) -> float:
    """Share of the measured time in which two replicas had a step under way at once."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for step in run.step_records:
        spans.setdefault(step.replica, []).append((step.start_ns, step.end_ns))
    both = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in spans.get(0, []) for b in spans.get(1, []))
    rows = [record for record in run.records if record.last_ns]
    total = max(r.last_ns for r in rows) - min(r.scheduled_ns for r in rows)
    return both / total


def replicas_table(runs: dict[str, Run]) -> Table:
    """What each run's replicas had to do."""
    rows = []
    for label, run in runs.items():
        done = [r for r in counted(run.records, run.window) if r.status == "completed"]
        prompt = sum(record.prompt_tokens for record in done)
        ttft = statistics.median((r.first_ns - r.scheduled_ns) / 1e6 for r in done)
        shares = ", ".join(f"replica {i}: {n}" for i, n in served_by(run).items())
        rows.append(
            [label, shares, f"{cached_tokens(run):,} of {prompt:,}", str(num_preemptions(run))]
            + [f"{ttft:.0f} ms (n = {len(done)})"]
        )
    columns = ["run", "requests", "prompt tokens from a cache", "preemptions", "TTFT p50"]
    return Table("What the replicas did", columns, rows)


def delay(num_prompt_tokens: int, load_tokens: int, free_tokens: int, cached_tokens: int) -> int:
    """The solution: tokens of work until this request's first token on that replica."""
    to_compute = max(1, num_prompt_tokens - cached_tokens)
    return load_tokens + to_compute + max(0, to_compute - free_tokens)


def check_delay(function: Callable[..., Any]) -> Check:
    """Held against the engine's own router."""
    return show_check(function, [_case(*case) for case in _CASES])


def _case(prompt: int, load: int, free: int, cached: int, why: str) -> Problem:
    expected = delay_tokens(prompt, ReplicaView(load_tokens=load, free_tokens=free, cached_tokens=cached))
    return Problem((prompt, load, free, cached), expected, why)


_CASES = (
    (552, 0, 4000, 0, "an idle replica without the prefix"),
    (552, 0, 4000, 512, "an idle replica that has the prefix"),
    (552, 2000, 4000, 512, "it has the prefix and a long queue: affinity alone would go there"),
    (552, 0, 100, 0, "no room for its KV: somebody must leave first"),
    (512, 0, 4000, 512, "all of it is cached: the last token is still computed"),
)
