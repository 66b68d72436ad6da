"""Where the time went: a request's TTFT and TPOT by what it waited for, and a rank's time by what it did.

Each part has its own two instants (or sums of them), on the path of the rank that sampled; none is what the
others leave. So their sum can be held against the TTFT that the client saw, and what is missing is shown as
`unaccounted` instead of being hidden in one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from labkit.measure.metrics import Window, num_tokens, tpot_ms, ttft_ms
from labkit.measure.records import RequestRecord, StepRecord
from labkit.measure.statistics import Summary, ladder

TTFT_PARTS = (
    "lateness",
    "network",
    "queue",
    "prefill_compute",
    "wait",
    "transfer",
    "handoff",
    "delivery",
    "unaccounted",
)
TPOT_PARTS = ("queue", "compute", "wait", "transfer", "handoff", "delivery", "unaccounted")
"""queue: the gaps between the steps that carried it; delivery: how much later the last token was on its way to the
client than the first, per token (below 0: the first took longer)."""
SHARES = ("compute", "wait", "transfer", "idle")


def ttft_parts_ms(record: RequestRecord) -> list[float] | None:
    """The parts of one TTFT in the order of TTFT_PARTS; None where the server told nothing of the request.

    None too where the server's clock is not the client's (its instants do not lie between send and first
    token): network and delivery cannot be told apart then.
    """
    server, total = record.server, ttft_ms(record)
    if server is None or total is None or not server.first_end_ns:
        return None
    if not record.sent_ns <= server.received_ns <= server.first_end_ns <= record.first_ns:
        return None
    released_ns = max(server.first_end_ns, server.released_ns)
    # KV on its way to another pool is part of TTFT where the user gets the first token from there.
    handoff_ns = released_ns - server.first_end_ns - server.handoff_queue_ns if server.released_ns else 0
    parts_ns = (
        record.sent_ns - record.scheduled_ns,
        server.received_ns - record.sent_ns,
        server.queue_ns + (server.handoff_queue_ns if server.released_ns else 0),
        server.compute_ns,
        server.wait_ns,
        server.transfer_ns,
        handoff_ns,
        record.first_ns - released_ns,
    )
    parts = [part / 1e6 for part in parts_ns]
    return [*parts, total - sum(parts)]


def tpot_parts_ms(record: RequestRecord) -> list[float] | None:
    """The parts of one TPOT in the order of TPOT_PARTS, each divided by n - 1; None where there is no TPOT, or where
    the server told nothing or by another clock.

    A handoff is TPOT's where the first token did not wait for it; else it stands in TTFT.
    """
    server, total = record.server, tpot_ms(record)
    if server is None or total is None or not server.first_end_ns:
        return None
    let_go_ns = max(server.first_end_ns, server.released_ns)
    if not (record.sent_ns <= let_go_ns <= record.first_ns and let_go_ns <= server.last_end_ns <= record.last_ns):
        return None
    moved = not server.released_ns
    parts_ns = (
        server.decode_queue_ns + (server.handoff_queue_ns if moved else 0),
        server.decode_compute_ns,
        server.decode_wait_ns,
        server.decode_transfer_ns,
        server.handoff_ns if moved else 0,
        (record.last_ns - server.last_end_ns) - (record.first_ns - let_go_ns),
    )
    parts = [part / 1e6 / (num_tokens(record) - 1) for part in parts_ns]
    return [*parts, total - sum(parts)]


def parts_of(
    records: Iterable[RequestRecord], of: Callable[[RequestRecord], list[float] | None], width: int
) -> NDArray[np.float64]:
    """Shape (requests, width), in ms: the completed requests of which the parts are known."""
    rows = [parts for record in records if record.status == "completed" and (parts := of(record)) is not None]
    return np.array(rows, np.float64).reshape(-1, width)


def summarize_ttft(records: Iterable[RequestRecord]) -> Summary:
    """`ttft_parts_ms`: means, which add up to the mean TTFT; `ttft_parts`: medians, n, share of unaccounted.

    Over completed requests. The share is sum(|unaccounted|) / sum(TTFT): errors of both signs do not cancel.
    """
    return ttft_table(parts_of(records, ttft_parts_ms, len(TTFT_PARTS)))


def summarize_tpot(records: Iterable[RequestRecord]) -> Summary:
    """`tpot_parts_ms` and `tpot_parts`, as `summarize_ttft` has them of TTFT."""
    return _parts_table("tpot", TPOT_PARTS, parts_of(records, tpot_parts_ms, len(TPOT_PARTS)))


def ttft_table(rows: NDArray[np.float64]) -> Summary:
    """The same from an array of shape (requests, len(TTFT_PARTS)), in ms."""
    return _parts_table("ttft", TTFT_PARTS, rows)


def _parts_table(figure: str, names: tuple[str, ...], rows: NDArray[np.float64]) -> Summary:
    if not len(rows):
        nothing = dict.fromkeys(names)
        return {
            f"{figure}_parts_ms": nothing,
            f"{figure}_parts": {"median_ms": nothing, "n": 0, "unaccounted_share": None},
        }
    means, medians = rows.mean(axis=0).tolist(), np.median(rows, axis=0).tolist()
    total = float(rows.sum())
    return {
        f"{figure}_parts_ms": dict(zip(names, means, strict=True)),
        f"{figure}_parts": {
            "median_ms": dict(zip(names, medians, strict=True)),
            "n": len(rows),
            "unaccounted_share": float(np.abs(rows[:, -1]).sum()) / total if total else None,
        },
    }


def handoff_figures(records: Iterable[RequestRecord]) -> Summary | None:
    """What went from prefill pool to decode pool, over completed requests; None where nothing did.

    `queue_ms`: until the decode pool had room; `ms`: of the move itself; `mib_per_s`: all bytes over all moves' time.
    """
    times = [record.server for record in records if record.status == "completed" and record.server]
    moved = [each for each in times if each.handoff_ns]
    if not moved:
        return None
    num_bytes, total_ns = sum(each.handoff_bytes for each in moved), sum(each.handoff_ns for each in moved)
    return {
        "num": len(moved),
        "bytes": num_bytes,
        "ms": ladder([each.handoff_ns / 1e6 for each in moved]),
        "queue_ms": ladder([each.handoff_queue_ns / 1e6 for each in moved]),
        "mib_per_s": num_bytes / 2**20 / (total_ns / 1e9),
    }


def phase_of(step: StepRecord) -> str:
    """prefill, decode, or mixed: a step that carries chunks and decodes belongs to neither."""
    if not step.num_prefill_seqs:
        return "decode"
    return "mixed" if step.num_decode_seqs else "prefill"


def unaccounted_share(steps: Iterable[StepRecord]) -> float | None:
    """Of the ranks' time from a plan's arrival to its step's end, what is in none of compute, wait, transfer and the
    wait for the stage before: sum of |what is missing| over that time, so that errors of both signs do not cancel.
    """
    missing = total = 0
    for step in steps:
        for at in range(len(step.ranks)):
            span = step.rank_end_ns[at] - step.rank_start_ns[at]
            idle = step.idle_ns[at] if step.idle_ns else 0
            missing += abs(span - step.compute_ns[at] - step.wait_ns[at] - step.transfer_ns[at] - idle)
            total += span
    return missing / total if total else None


def step_share(steps: Sequence[StepRecord], window: Window, ranks: Sequence[int] | None = None) -> Summary:
    """Shares of the window that the ranks spent in compute, wait and transfer; the rest is idle.

    The top level is the mean over ranks, `by_rank` each of them, `by_phase` the shares of the time in which a
    step of that phase was under way (plan sent to ids back). `ranks`: those of the layout, so that one that
    did nothing counts as idle; by default those that took part. A step counts where it ended. `unaccounted`: of
    the time in steps, what is in none of their parts.
    """
    inside = [step for step in steps if window.start_ns <= step.end_ns <= window.end_ns]
    known = sorted({rank for step in inside for rank in step.ranks} | set(ranks or ()))
    by_rank = [
        {"rank": rank, **_shares(_spent(inside, rank), window.end_ns - window.start_ns)} for rank in known
    ]
    mean = {name: float(np.mean([row[name] for row in by_rank])) if inside else None for name in SHARES}
    phases = {
        name: [step for step in inside if phase_of(step) == name] for name in ("prefill", "decode", "mixed")
    }
    return {
        **mean,
        "by_rank": by_rank if inside else [],
        "by_phase": {name: _phase(rows) for name, rows in phases.items() if rows},
        "num_steps": len(inside),
        "unaccounted": unaccounted_share(inside),
    }


def _spent(steps: Iterable[StepRecord], rank: int) -> tuple[int, int, int]:
    compute = wait = transfer = 0
    for step in steps:
        if rank in step.ranks:
            at = step.ranks.index(rank)
            compute += step.compute_ns[at]
            wait += step.wait_ns[at]
            transfer += step.transfer_ns[at]
    return compute, wait, transfer


def _shares(spent: tuple[int, int, int], span_ns: int) -> dict[str, float]:
    shares = [part / span_ns if span_ns else 0.0 for part in spent]
    return dict(zip(SHARES, [*shares, max(0.0, 1 - sum(shares))], strict=True))


def _phase(steps: list[StepRecord]) -> Summary:
    """Shares of rank-time: a step of r ranks that took t is r·t to be shared out."""
    sums = [
        sum(map(sum, parts))
        for parts in (
            [step.compute_ns for step in steps],
            [step.wait_ns for step in steps],
            [step.transfer_ns for step in steps],
        )
    ]
    span_ns = sum((step.end_ns - step.start_ns) * len(step.ranks) for step in steps)
    return {
        **_shares((sums[0], sums[1], sums[2]), span_ns),
        "num_steps": len(steps),
        "rank_time_s": span_ns / 1e9,
    }
