"""Requests that outlive what was expected of them, where that may be told when something else happens anyhow."""

from __future__ import annotations

from heapq import heappop, heappush

from labkit.engine.ledger import Ledger
from labkit.plan.sim.request import Job


class Late:
    """By the tick at which they have as many tokens as were expected."""

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, Job]] = []

    def add(self, job: Job) -> None:
        if job.expected_tokens < job.final:
            heappush(self.heap, (job.since + job.expected_tokens - job.num_computed, job.order, job))

    def catch_up(self, tick: int, ledger: Ledger) -> None:
        """Those that still decode are expected to fill the block that they are in."""
        heap = self.heap
        while heap and heap[0][0] < tick:
            job = heappop(heap)[2]
            if job.slot >= 0:
                ledger.expect_block(job, job.num_computed + tick - job.since + 1)
                self.add(job)
