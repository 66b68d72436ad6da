"""What the engine tells the event stream, gathered so that telling costs little: steps by the tenth of a
second, the replicas' queues eight times a second and only while there is work.

Rows of collectives travel beside the steps, as one array for the recorder; a client gets them added up by axis,
operation and phase.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from labkit.engine.handoff import Handoff
from labkit.engine.messages import Profiled
from labkit.engine.plan import StepPlan
from labkit.engine.replica import Flight
from labkit.layout import Layout, query_loads
from labkit.measure.crossing_meter import tally
from labkit.measure.experts import ExpertStep, waits_for_busiest
from labkit.measure.recorder import MergedStep
from labkit.measure.records import MemoryRecord, ServerTimes, StepRecord
from labkit.model.counts import visible_pairs

Emit = Callable[[dict[str, Any]], None]
STEPS_PERIOD_S = 0.1
PULSE_PERIOD_S = 0.125


class Reporter:
    """`describe` gives the replicas as they are, None when there is nothing to do."""

    def __init__(self, emit: Emit, describe: Callable[[], list[dict[str, Any]] | None]) -> None:
        self._emit, self._describe = emit, describe
        self._steps: list[StepRecord] = []
        self._rows: list[NDArray[np.void]] = []
        self._is_beating = False

    def request(self, times: ServerTimes) -> None:
        self._emit({"event": "request", **msgspec.structs.asdict(times)})

    def memory(self, records: list[MemoryRecord]) -> None:
        self._emit({"event": "memory", "ranks": records})

    def profiled(self, message: Profiled) -> None:
        self._emit({"event": "profile", **msgspec.structs.asdict(message)})

    def handoff(self, handoff: Handoff, end_ns: int) -> None:
        self._emit(
            {
                "event": "handoff",
                "request_id": handoff.request.id,
                "run_id": handoff.request.run_id,
                "source": handoff.source.index,
                "target": handoff.target.index,
                "num_tokens": handoff.num_tokens,
                "bytes": handoff.sent_bytes,
                "left_ns": handoff.left_ns,
                "start_ns": handoff.start_ns,
                "end_ns": end_ns,
            }
        )

    def step(self, flight: Flight, merged: MergedStep, experts: ExpertStep | None = None) -> None:
        if not self._steps:
            asyncio.get_running_loop().call_later(STEPS_PERIOD_S, self.flush)
        self._steps.append(step_record(flight, merged, flight.replica.layout, experts))
        if len(merged.rows):
            self._rows.append(merged.rows)

    def flush(self) -> None:
        steps, self._steps = self._steps, []
        rows, self._rows = self._rows, []
        together = np.concatenate(rows) if rows else None
        if together is not None:
            self._emit({"event": "collectives", "rows": together})
        if steps:
            crossings = tally(together) if together is not None else []
            self._emit({"event": "steps", "steps": steps, "crossings": crossings})

    def start_pulse(self) -> None:
        """Beat until there is nothing to do; once more then, so that the page sees the queues empty."""
        if not self._is_beating:
            self._is_beating = True
            asyncio.get_running_loop().call_soon(self._beat)

    def _beat(self) -> None:
        replicas = self._describe()
        self._is_beating = replicas is not None and any(r["waiting"] + r["running"] for r in replicas)
        if replicas is not None:
            self._emit({"event": "engine", "t_ns": time.monotonic_ns(), "replicas": replicas})
        if self._is_beating:
            asyncio.get_running_loop().call_later(PULSE_PERIOD_S, self._beat)


def step_record(
    flight: Flight, merged: MergedStep, layout: str, experts: ExpertStep | None = None
) -> StepRecord:
    plan = flight.plan
    everybody = (request for each in flight.round for request in each.requests)
    return StepRecord(
        run_id=next((request.run_id for request in everybody if request.run_id), ""),
        epoch=flight.epoch,
        step_id=flight.step_id,
        replica=flight.replica.index,
        layout=layout,
        start_ns=flight.start_ns,
        end_ns=flight.end_ns,
        num_prefill_seqs=plan.num_prefill_seqs,
        num_decode_seqs=plan.num_decode_seqs,
        prefill_tokens=plan.prefill_tokens,
        context_tokens=flight.context_tokens,
        ranks=merged.ranks,
        rank_start_ns=merged.start_ns,
        rank_end_ns=merged.end_ns,
        compute_ns=merged.compute_ns,
        wait_ns=merged.wait_ns,
        transfer_ns=merged.transfer_ns,
        collective_bytes=merged.collective_bytes,
        num_collectives=merged.num_collectives,
        **_expert_figures(experts, merged),
        idle_ns=merged.idle_ns,
        query_keys=_query_keys(flight, layout),
        in_flight_bytes=flight.replica.in_flight.most_bytes(merged.rows),
        **_attended(plan),
    )


def _query_keys(flight: Flight, slug: str) -> list[int]:
    """How evenly the step's prompts were shared out over the pcp ranks; nothing where there is one."""
    layout, plan = Layout.parse(slug), flight.plan
    if layout.pcp == 1 or not plan.chunks:
        return []
    loads = [
        query_loads(layout, end - chunk, chunk) for end, chunk in zip(plan.ends, plan.chunks, strict=True)
    ]
    return [sum(of_rank) for of_rank in zip(*loads, strict=True)]


def _attended(plan: StepPlan) -> dict[str, Any]:
    """A chunk's own numbers are final when it is planned, unlike those of its request."""
    chunks = list(zip(plan.ends, plan.chunks, strict=True))
    return {
        "prefill_pairs": sum(visible_pairs(chunk, end - chunk, None) for end, chunk in chunks),
        "prefill_context": sum(end - chunk for end, chunk in chunks),
        "num_sampled": len(plan.sampled),
    }


def _expert_figures(experts: ExpertStep | None, merged: MergedStep) -> dict[str, Any]:
    if experts is None:
        return {}
    return {
        "expert_tokens": experts.tokens_by_expert,
        "expert_rows": experts.rows,
        "expert_sent_bytes": experts.sent_bytes,
        "expert_ns": experts.time_ns,
        "expert_wait_ns": waits_for_busiest(merged.rows, merged.ranks),
        "num_dropped": experts.num_dropped,
    }
