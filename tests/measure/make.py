"""Small records with instants in ms, so that the figures can be done by hand."""

from __future__ import annotations

from typing import Any

from labkit.measure.records import RequestRecord, ServerTimes, StepRecord

MS = 1_000_000


def request(
    at_ms: float = 0.0,
    chunks_ms: tuple[float, ...] = (),
    tokens: tuple[int, ...] = (),
    *,
    index: int = 0,
    status: str = "completed",
    late_ms: float = 0.0,
    **fields: Any,
) -> RequestRecord:
    """A request scheduled at `at_ms` whose chunks came at those instants, one token each unless told."""
    tokens = tokens or (1,) * len(chunks_ms)
    times = [round(at * MS) for at in chunks_ms]
    record = RequestRecord(
        request_id=f"r-{index}",
        index=index,
        status=status,
        scheduled_ns=round(at_ms * MS),
        sent_ns=round((at_ms + late_ms) * MS),
        first_ns=times[0] if times else 0,
        last_ns=times[-1] if times else 0,
        end_ns=times[-1] if times else 0,
        n=sum(tokens),
        prompt_tokens=10,
        chunk_ns=times,
        chunk_tokens=list(tokens),
    )
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def server_times(record: RequestRecord, parts_ms: dict[str, float], **fields: Any) -> ServerTimes:
    """The server's share of a request: network, queue, compute, wait, transfer, delivery in ms."""
    received = record.sent_ns + round(parts_ms.get("network", 0) * MS)
    first_end = record.first_ns - round(parts_ms.get("delivery", 0) * MS)
    times = ServerTimes(
        request_id=record.request_id,
        run_id="r",
        layout="tp1",
        replica=0,
        routed_because="only",
        received_ns=received,
        first_start_ns=received + round(parts_ms.get("queue", 0) * MS),
        first_end_ns=first_end,
        last_end_ns=record.last_ns,
        finished_ns=record.last_ns,
        prompt_tokens=10,
        cached_tokens=0,
        output_tokens=record.n,
        finish_reason="length",
        num_preemptions=0,
        requeued=False,
    )
    for name in ("queue", "compute", "wait", "transfer"):
        setattr(times, f"{name}_ns", round(parts_ms.get(name, 0) * MS))
    for name, value in fields.items():
        setattr(times, name, value)
    return times


def step(
    start_ms: float, end_ms: float, compute_ms: list[float], wait_ms: list[float], transfer_ms: list[float],
    *, prefill: int = 0, decode: int = 1, step_id: int = 0,
) -> StepRecord:  # fmt: skip
    ranks = list(range(len(compute_ms)))

    def ns(values: list[float]) -> list[int]:
        return [round(value * MS) for value in values]

    return StepRecord(
        run_id="r",
        epoch=1,
        step_id=step_id,
        replica=0,
        layout="tp2",
        start_ns=round(start_ms * MS),
        end_ns=round(end_ms * MS),
        num_prefill_seqs=prefill,
        num_decode_seqs=decode,
        prefill_tokens=prefill * 16,
        context_tokens=100,
        ranks=ranks,
        rank_start_ns=ns([start_ms] * len(ranks)),
        rank_end_ns=ns([end_ms] * len(ranks)),
        compute_ns=ns(compute_ms),
        wait_ns=ns(wait_ms),
        transfer_ns=ns(transfer_ms),
        collective_bytes=1024,
        num_collectives=4,
    )
