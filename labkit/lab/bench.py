"""Measure what joins ranks, on ranks of the measurement's own: they hold no model, and go when it is over.

Rows come as they are measured, one operation and size after another. With a model, the messages of its steps under the
layout are told beside the lines: where on the curve the model lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from labkit.cluster.nodes import Nodes
from labkit.cluster.pool import Pool, PoolConfig, PoolFailure, default_run_dir
from labkit.engine.bench_messages import Bench, Benched
from labkit.engine.messages import Configure, Configured, RankMessage
from labkit.engine.places import nodes_of
from labkit.layout import AXES, Layout, StepShape
from labkit.layout.fabrics import fabric_of
from labkit.measure.collectives import BOTH_PLACES, OPS, Line, fits, row
from labkit.measure.link_bench import LinkBench
from labkit.measure.step_messages import axis_messages
from labkit.model.spec import load_spec
from labkit.paths import runtime_dir

_ANSWER_S = 300.0
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
OnRow = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class BenchPlan:
    """What is to be measured. `axis`: whose groups; ranks beyond the layout do nothing."""

    layout: Layout
    axis: str = "tp"
    ops: Sequence[str] = ("all_reduce",)
    num_bytes: Sequence[int] = (4096,)
    fabric: str = "shm"
    device: str = "cpu"
    dtype: str = "float32"
    num_warmup: int = 5
    num_rounds: int = 20
    check: bool = True
    threads: int = 1
    nodes: Nodes | None = None
    num_ranks: int = 0
    """Ranks to start; 0: those of the layout."""
    module: str = "labkit.engine.bench_worker"
    """What each rank runs."""

    def __post_init__(self) -> None:
        for op in self.ops:
            if op not in OPS:
                raise ValueError(f"{op!r} is no collective that is measured here; there are {', '.join(OPS)}.")
        if self.axis not in AXES or self.degree < 2:
            several = [axis for axis in AXES if len(self.layout.groups(axis)[0]) > 1]
            raise ValueError(
                f"{self.layout} has no group of two ranks or more on the axis {self.axis!r}; "
                f"{'it has: ' + ', '.join(several) if several else 'split it over more ranks'}."
            )
        if self.num_rounds < 1 or self.num_warmup < 0:
            raise ValueError(
                f"{self.num_rounds} rounds after {self.num_warmup} of warm-up: measure 1 round or more, "
                f"after 0 or more."
            )

    @property
    def degree(self) -> int:
        return len(self.layout.groups(self.axis)[0]) if self.axis in AXES else 1


@dataclass
class _Answers:
    """One answer of one kind from each rank."""

    kind: type[Any]
    num: int
    got: dict[int, Any] = field(default_factory=dict)
    all: asyncio.Future[dict[int, Any]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def add(self, rank: int, message: RankMessage) -> None:
        if isinstance(message, self.kind):
            self.got[rank] = message
            if len(self.got) == self.num and not self.all.done():
                self.all.set_result(self.got)


class BenchRanks:
    """Ranks under a layout, without a model. `async with` starts and ends them; PoolError when they do not come."""

    def __init__(
        self, layout: Layout, *, fabric: str, device: str, dtype: str = "float32", threads: int = 1,
        num_ranks: int = 0, nodes: Nodes | None = None, module: str = "labkit.engine.bench_worker",
    ) -> None:  # fmt: skip
        self._num_ranks = nodes.num_ranks if nodes else num_ranks or layout.world_size
        self._configure = Configure(
            1, layout.slug, "", 0, dtype, 0, 16, 512, 64, threads, fabric, False, False
        )  # fmt: skip
        backend = "nccl" if device == "cuda" else "gloo"
        config = PoolConfig(
            self._num_ranks, threads, device, backend, default_run_dir(runtime_dir()), module=module, nodes=nodes,
        )  # fmt: skip
        self._answers: _Answers | None = None
        self._pool = Pool(config, self._on_message, self._on_failure, lambda state: None)

    async def __aenter__(self) -> Self:
        await self._pool.start()
        self._configure.nodes = nodes_of(self._pool.hellos)
        await self.ask(self._configure, Configured)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.stop()

    async def ask(self, message: Any, kind: type[Any]) -> dict[int, Any]:
        """Each rank's answer to the message. Raises RuntimeError with the words of a rank that failed."""
        self._answers = _Answers(kind, self._num_ranks)
        self._pool.send_many(range(self._num_ranks), message)
        return await asyncio.wait_for(self._answers.all, _ANSWER_S)

    def _on_message(self, rank: int, message: RankMessage) -> None:
        if self._answers is not None:
            self._answers.add(rank, message)

    def _on_failure(self, failure: PoolFailure) -> None:
        if self._answers is not None and not self._answers.all.done():
            self._answers.all.set_exception(RuntimeError(f"{failure.error}\n{failure.traceback}".strip()))


class Benchmark(BenchRanks):
    """Collectives of one axis's groups."""

    def __init__(self, plan: BenchPlan) -> None:
        self.plan = plan
        super().__init__(
            plan.layout, fabric=plan.fabric, device=plan.device, dtype=plan.dtype, threads=plan.threads,
            num_ranks=plan.num_ranks, nodes=plan.nodes, module=plan.module,
        )  # fmt: skip

    async def rows(self, on_row: OnRow | None = None) -> list[dict[str, Any]]:
        """Every operation at every size, in and out of place where it can be both."""
        found = []
        for op in self.plan.ops:
            for in_place in (False, True) if op in BOTH_PLACES else (False,):
                for num_bytes in self.plan.num_bytes:
                    for each in await self._measured(op, num_bytes, in_place):
                        found.append(each)
                        if on_row is not None:
                            on_row(each)
        return found

    async def pairs(self, on_row: OnRow | None = None) -> list[dict[str, Any]]:
        """A row for each two ranks of the pool, over whatever joins them."""
        plan, nodes = self.plan, nodes_of(self._pool.hellos)
        bench = LinkBench(
            lambda message: self.ask(message, Benched), device=plan.device, dtype=plan.dtype, threads=plan.threads,
            check=plan.check,
        )  # fmt: skip
        return await bench.pairs(self._num_ranks, plan.fabric, nodes, on_row or (lambda each: None))

    async def _measured(self, op: str, num_bytes: int, in_place: bool) -> list[dict[str, Any]]:
        """A row for each group of the axis: they work at the same time, as they do in a step."""
        plan = self.plan
        bench = Bench(1, plan.axis, op, num_bytes, in_place, plan.dtype, plan.num_warmup, plan.num_rounds, plan.check)
        answers: dict[int, Benched] = await self.ask(bench, Benched)
        nodes = nodes_of(self._pool.hellos)
        rows = []
        for index, ranks in enumerate(plan.layout.groups(plan.axis)):
            mine = [answers[rank] for rank in ranks if answers[rank].times_ns]
            slowest = np.max([answer.times_ns for answer in mine], axis=0).tolist()
            wrong = sum(answer.num_wrong for answer in mine)
            size = 2 if op == "sendrecv" else len(ranks)
            rows.append(
                row(op, num_bytes, size, slowest, wrong=wrong, in_place=in_place, axis=plan.axis, group=index,
                    group_ranks=list(ranks), fabric=fabric_of(ranks, plan.fabric, nodes), dtype=plan.dtype)
            )  # fmt: skip
        return rows


async def measure(plan: BenchPlan, on_row: OnRow | None = None) -> list[dict[str, Any]]:
    async with Benchmark(plan) as benchmark:
        return await benchmark.rows(on_row)


async def measure_pairs(plan: BenchPlan, on_row: OnRow | None = None) -> list[dict[str, Any]]:
    async with Benchmark(plan) as benchmark:
        return await benchmark.pairs(on_row)


def marks(
    plan: BenchPlan, model: str, rows: Sequence[dict[str, Any]], steps: dict[str, StepShape]
) -> list[dict[str, Any]]:
    """Where the model's own messages stand: of each step shape and operation of the axis, bytes (of the whole buffer),
    count, and the time that the measured line gives one of them and all of them; None where its line is missing."""
    spec, dtype_bytes = load_spec(model), _DTYPE_BYTES[plan.dtype]
    lines = {(each["op"], each["in_place"]): Line(each["alpha_us"], each["gb_per_s"], ()) for each in fits(rows)}
    return [
        {"phase": phase, **message}
        for phase, step in steps.items()
        for message in axis_messages(
            plan.axis, plan.layout, spec, step, dtype_bytes, lambda op, in_place: lines.get((op, in_place))
        )
    ]


def summary(plan: BenchPlan, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The JSON line: rows, and a line through each operation's sizes (of the first group)."""
    first = [each for each in rows if each["group"] == 0]
    several = {(each["op"], each["bytes"]) for each in first}
    return {
        "layout": plan.layout.slug,
        "axis": plan.axis,
        "fabric": rows[0]["fabric"] if rows else plan.fabric,
        "device": plan.device,
        "dtype": plan.dtype,
        "warmup_rounds": plan.num_warmup,
        "rounds": plan.num_rounds,
        "checked": plan.check,
        "wrong": sum(each["wrong"] for each in rows),
        "rows": list(rows),
        "fits": fits(first) if len(several) > 1 else [],
    }


def pairs_summary(plan: BenchPlan, pairs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The JSON line of a matrix of pairs."""
    return {
        "fabric": plan.fabric,
        "device": plan.device,
        "dtype": plan.dtype,
        "checked": plan.check,
        "wrong": sum(each["wrong"] for each in pairs),
        "pairs": list(pairs),
    }
