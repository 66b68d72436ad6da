"""Runs made of rows, not of a server: what the figures draw, with values that the tests can recompute."""

from __future__ import annotations

from labkit.lab.plan import RunPlan
from labkit.lab.run import Run
from labkit.lab.summary import Setting, build_summary
from labkit.layout import Layout, holdings
from labkit.measure.records import Environment, RequestRecord, ServerTimes, StepRecord
from labkit.model.spec import load_spec

MS, MIB = 1_000_000, 2**20


def make_run(
    layout: str, num_requests: int = 20, *, ttft_ms: float = 100.0, num_cores: int = 2, rate: float = 2.0
) -> Run:
    """TTFT of request i is ttft_ms + i, TPOT 10 ms; a prefill step and a decode step on every rank."""
    records = [_request(layout, i, ttft_ms + i, rate) for i in range(num_requests)]
    ranks = list(range(Layout.parse(layout).ranks_per_replica))
    steps = [_step(layout, ranks, 0, prefill=1), _step(layout, ranks, 1, prefill=0)]
    where = Setting(
        model="lab-30m",
        layout=layout,
        environment=_environment(layout, num_cores),
        memory=[_memory(layout, rank) for rank in range(Layout.parse(layout).world_size)],
        settings={"memory_per_rank": 96 * MIB},
    )
    summary = build_summary(RunPlan(), where, records, steps, None, run_id=f"run-{layout}")
    summary["rate"] = rate
    return Run(f"run-{layout}", summary, records, steps)


def _request(layout: str, index: int, ttft: float, rate: float) -> RequestRecord:
    at = round(index * 1e9 / rate)
    first, last = at + round(ttft * MS), at + round((ttft + 90) * MS)
    server = ServerTimes(
        request_id=f"r-{index}", run_id="r", layout=layout, replica=0, routed_because="", received_ns=at + 2 * MS,
        first_start_ns=at + 10 * MS, first_end_ns=first - MS, last_end_ns=last - MS, finished_ns=last, prompt_tokens=64,
        cached_tokens=0, output_tokens=10, finish_reason="length", num_preemptions=0, requeued=False,
        queue_ns=8 * MS, compute_ns=first - at - 14 * MS, wait_ns=2 * MS, transfer_ns=MS,
        decode_queue_ns=10 * MS, decode_compute_ns=70 * MS, decode_wait_ns=6 * MS, decode_transfer_ns=4 * MS,
    )  # fmt: skip
    return RequestRecord(
        request_id=f"r-{index}", index=index, status="completed", scheduled_ns=at, sent_ns=at + MS, first_ns=first,
        last_ns=last, end_ns=last, asked_prompt_tokens=64, asked_output_tokens=10, prompt_tokens=64, n=10,
        chunk_ns=[first, last], chunk_tokens=[1, 9], http_status=200, server=server,
    )  # fmt: skip


def _step(layout: str, ranks: list[int], step_id: int, prefill: int) -> StepRecord:
    start, n = step_id * 10 * MS, len(ranks)
    return StepRecord(
        run_id="r", epoch=1, step_id=step_id, replica=0, layout=layout, start_ns=start, end_ns=start + 10 * MS,
        num_prefill_seqs=prefill, num_decode_seqs=1 - prefill, prefill_tokens=64 * prefill, context_tokens=64,
        ranks=ranks, rank_start_ns=[start] * n, rank_end_ns=[start + 10 * MS] * n, compute_ns=[6 * MS] * n,
        wait_ns=[2 * MS] * n, transfer_ns=[MS] * n, collective_bytes=2048, num_collectives=17,
    )  # fmt: skip


def _memory(layout: str, rank: int) -> dict[str, object]:
    held = holdings(Layout.parse(layout), load_spec("lab-30m"), rank, 4)
    parts = {holding.part: holding.bytes for holding in held}
    weights = sum(parts.values())
    return {"rank": rank, "weights": weights, "kv": 20 * MIB, "other": 0, "free": MIB, "weights_by_part": parts}


def _environment(layout: str, num_cores: int) -> Environment:
    return Environment(
        host="here", backend="cpu", fabric="shm", device="cpu", num_cores=num_cores,
        num_ranks=Layout.parse(layout).world_size, threads_per_rank=1, dtype="float32",
        versions={"python": "3"}, seed=0, started_at="2026-11-29T10:00:00+00:00",
    )  # fmt: skip
