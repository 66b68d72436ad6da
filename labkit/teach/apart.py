"""Prefill apart from decode: what a decoding sequence is spared, and what it costs to hand its KV over.

Where one pool does both, a step that carries a prompt's chunk lasts as long as the chunk does, and every sequence that
decodes in it waits for its next token that long. Where they are apart no such step exists: that is a count, and right
on any machine. Whether it pays is a matter of times, so of the machine.
"""

from __future__ import annotations

import statistics
from typing import Any

from labkit.lab import Run
from labkit.layout import Deployment
from labkit.load.lengths import Lengths
from labkit.load.workload import Part, Workload
from labkit.measure.records import StepRecord
from labkit.teach.html import Table
from labkit.teach.reference import ReferenceCase

CHATS_AND_LONG = Workload(
    name="chats-and-long",
    title="Two chats for each prompt that fills a step",
    parts=(
        Part(Lengths("uniform", min_tokens=24, max_tokens=48), Lengths("constant", tokens=48), "chat", 2.0),
        Part(Lengths("constant", tokens=500), Lengths("constant", tokens=8), "long", 1.0),
    ),
)


def _decoding(run: Run, with_prompt: bool) -> list[StepRecord]:
    return [s for s in run.step_records if s.num_decode_seqs and bool(s.num_prefill_seqs) == with_prompt]


def shared_share(run: Run) -> float:
    """Of all decoded tokens, the share whose step carried a piece of somebody's prompt too."""
    alone, shared = (sum(step.num_decode_seqs for step in _decoding(run, mixed)) for mixed in (False, True))
    return shared / (alone + shared)


def token_ms(run: Run, with_prompt: bool) -> float | None:
    """Median length of the steps that decoded tokens, a step counted once a token; None where there was none."""
    steps = [
        (step.end_ns - step.start_ns) / 1e6 for step in _decoding(run, with_prompt) for _ in range(step.num_decode_seqs)
    ]
    return statistics.median(steps) if steps else None


def apart_table(runs: dict[str, Run]) -> Table:
    """Whose tokens shared a step with a prompt, how long either kind took, and the tails that come of it."""
    rows = []
    for label, run in runs.items():
        itl, ttft = run.summary["itl_ms"], run.summary["ttft_ms"]
        rows.append(
            [label, f"{shared_share(run):.0%}", _ms(token_ms(run, False)), _ms(token_ms(run, True))]
            + [_ms(itl["p50"]), f"{_ms(itl['p99'])}{_grey(itl)}", f"{_ms(ttft['p50'])} (n = {ttft['n']})", _idle(run)]
        )
    columns = ["layout", "tokens that shared a step with a prompt", "a token's step, alone", "shared with a prompt"]
    columns += ["ITL p50", "ITL p99", "TTFT p50", "a rank without a step"]
    return Table("Prefill and decode, together and apart", columns, rows)


def _ms(value: float | None) -> str:
    return "none" if value is None else f"{value:.1f} ms"


def _grey(ladder: dict[str, Any]) -> str:
    return " (too few samples)" if "p99" in ladder["few"] else ""


def _idle(run: Run) -> str:
    """By rank: the share of the run in which no step of its pool was under way."""
    deployment = Deployment.parse(run.summary["layout"])
    begin = min(record.scheduled_ns for record in run.records)
    span = max(record.last_ns for record in run.records) - begin
    found = []
    for rank in range(deployment.world_size):
        busy = sum(step.end_ns - step.start_ns for step in run.step_records if rank in step.ranks)
        found.append(f"{max(0.0, 1 - busy / span):.0%}")
    return ", ".join(found)


def handoff_table(runs: dict[str, Run], case: ReferenceCase) -> Table:
    """What every handoff carried and took, beside the KV of the prompts by the shapes."""
    rows = []
    for label, run in runs.items():
        told, done = run.summary["handoff"], [record for record in run.records if record.status == "completed"]
        expected = sum(record.prompt_tokens for record in done) * case.kv_bytes_per_token("tp1")
        part = (run.summary["ttft_parts_ms"] or {}).get("handoff")
        rows.append(
            [label, f"{told['num']}", f"{told['bytes']:,} B", f"{expected:,} B", _ms(told["ms"]["p50"])]
            + [f"{told['mib_per_s']:.0f} MiB/s", f"{_ms(part)} of {_ms(run.summary['ttft_ms']['mean'])}"]
        )
    columns = ["", "handoffs", "bytes, all together", "KV of the prompts, by the shapes", "one took, p50", "rate"]
    columns += ["of the mean TTFT"]
    return Table("What it costs to be apart", columns, rows)
