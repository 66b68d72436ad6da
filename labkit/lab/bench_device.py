"""Measure what each rank's device can do at best, alone and while all the others do the same.

The ranks are real ones, with their threads and their device, and hold no model. A step's compute and reads are held
against these ceilings; how far the ranks fall short together of what each does alone is what they share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.engine.bench_messages import BenchDevice, DeviceBenched
from labkit.lab.bench import BenchRanks
from labkit.layout import Layout
from labkit.measure.device import ceilings, row

DTYPES = ("float32", "bfloat16", "float16")
SMALLEST_SIDE, LARGEST_SIDE, LONGEST_ROUND_S = 256, {"cpu": 1024, "cuda": 8192}, 0.3
OnRow = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class DevicePlan:
    """What is to be measured. num_bytes, side 0: what suits the device (a buffer of several times its last cache)."""

    num_ranks: int = 1
    dtypes: Sequence[str] = ("float32", "bfloat16")
    device: str = "cpu"
    threads: int = 1
    num_bytes: int = 0
    side: int = 0
    num_warmup: int = 2
    num_rounds: int = 10
    check: bool = True
    module: str = "labkit.engine.bench_worker"

    def __post_init__(self) -> None:
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise ValueError(f"{dtype!r} is no dtype that is measured here; there are {', '.join(DTYPES)}.")
        if self.num_ranks < 1 or self.threads < 1:
            raise ValueError(
                f"{self.num_ranks} ranks of {self.threads} threads: measure 1 rank or more, of 1 thread or more."
            )
        if self.num_rounds < 1 or self.num_warmup < 0:
            raise ValueError(
                f"{self.num_rounds} rounds after {self.num_warmup} of warm-up: measure 1 round or more, "
                f"after 0 or more."
            )
        if self.num_bytes < 0 or self.side < 0 or 0 < self.num_bytes < 64 or 0 < self.side < 8:
            raise ValueError(
                f"a buffer of {self.num_bytes} bytes and matrices of side {self.side}: give 64 bytes and a side of 8 "
                f"or more, or 0 for what suits the device."
            )

    @property
    def work(self) -> list[tuple[str, str, int]]:
        """(what, dtype, size)"""
        return [("copy", "float32", self.num_bytes), *(("matmul", dtype, self.side) for dtype in self.dtypes)]

    @property
    def casts(self) -> list[list[int]]:
        """Who works at the same time: each rank alone, then all of them."""
        everybody = list(range(self.num_ranks))
        return [[rank] for rank in everybody] + ([everybody] if self.num_ranks > 1 else [])


class DeviceBenchmark(BenchRanks):
    def __init__(self, plan: DevicePlan) -> None:
        self.plan = plan
        super().__init__(
            Layout(tp=plan.num_ranks), fabric="nccl" if plan.device == "cuda" else "shm", device=plan.device,
            threads=plan.threads, module=plan.module,
        )  # fmt: skip

    async def rows(self, on_row: OnRow | None = None) -> list[dict[str, Any]]:
        found = []
        for what, dtype, size in self.plan.work:
            size = size or (await self._side(dtype) if what == "matmul" else 0)
            for ranks in self.plan.casts:
                for each in await self._measured(what, dtype, size, ranks):
                    found.append(each)
                    if on_row is not None:
                        on_row(each)
        return found

    async def _side(self, dtype: str) -> int:
        """The device's usual one, or a smaller where a round of it would last (a CPU without bfloat16 is slow)."""
        side = SMALLEST_SIDE
        while side < LARGEST_SIDE[self.plan.device]:
            probe = BenchDevice(1, "matmul", dtype, side, [0], 1, 1, False)
            answer: DeviceBenched = (await self.ask(probe, DeviceBenched))[0]
            if 8 * answer.times_ns[0] > LONGEST_ROUND_S * 1e9:
                break
            side *= 2
        return side

    async def _measured(self, what: str, dtype: str, size: int, ranks: list[int]) -> list[dict[str, Any]]:
        plan = self.plan
        message = BenchDevice(1, what, dtype, size, ranks, plan.num_warmup, plan.num_rounds, plan.check)
        answers: dict[int, DeviceBenched] = await self.ask(message, DeviceBenched)
        return [
            row(what, dtype, answers[rank].size, answers[rank].times_ns, wrong=answers[rank].num_wrong,
                together=len(ranks) > 1, rank=rank, device=self._pool.hellos[rank].device,
                in_cache=what == "copy" and 2 * answers[rank].size < 4 * answers[rank].cache_bytes)
            for rank in ranks
        ]  # fmt: skip


async def measure_device(plan: DevicePlan, on_row: OnRow | None = None) -> list[dict[str, Any]]:
    """A row for each rank, work and company. Raises PoolError, RuntimeError."""
    async with DeviceBenchmark(plan) as benchmark:
        return await benchmark.rows(on_row)


def device_summary(plan: DevicePlan, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The JSON line: the ceilings, and every row."""
    return {
        "ranks": plan.num_ranks,
        "device": plan.device,
        "threads_per_rank": plan.threads,
        "warmup_rounds": plan.num_warmup,
        "rounds": plan.num_rounds,
        "checked": plan.check,
        "wrong": sum(each["wrong"] for each in rows),
        **ceilings(rows),
        "rows": list(rows),
    }
