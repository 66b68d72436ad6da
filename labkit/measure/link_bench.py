"""What joins ranks, measured on the ranks themselves, one question after another: pairs, and collectives by size.

`ask` puts a message to every rank of a pool and gives each one's answer; whose pool it is (a bench's own, or the lab
server's warm one) makes no difference here. Sizes grow while a round stays short, and each size is repeated as often
as fits its budget, so that a slow link takes seconds and not minutes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from labkit.engine.bench_messages import Benched, BenchLink
from labkit.layout.fabrics import fabric_of, spans_nodes
from labkit.measure.collectives import BOTH_PLACES, PINGPONG, fits, row, sizes
from labkit.measure.pairs import PROBE_BYTES, SMALL_BYTES, large_bytes, num_rounds, pair_row, pairs_of, way_ns

Ask = Callable[[BenchLink], Awaitable[Mapping[int, Benched]]]
OnRow = Callable[[dict[str, Any]], None]
CURVE_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "sendrecv")
CURVE_SIZES = {"cpu": sizes(64, 4 << 20), "cuda": sizes(1024, 64 << 20)}
SMALL_BUDGET_S, LARGE_BUDGET_S, SIZE_BUDGET_S = 0.05, 0.25, 0.12
SETTLE_S = 0.02
"""Before small messages count: until then a system may have both ranks on one core, and moves them apart."""
FIRST_WARMUP = 50
"""Rounds of a curve's smallest size that do not count, for the same reason."""
LONGEST_ROUND_S = 0.25


@dataclass(frozen=True)
class CurveGroup:
    """Ranks whose collectives are measured together, and over what."""

    axis: str
    """The layout's that has such a group; world: no axis, all the ranks of the pool."""
    ranks: tuple[int, ...]
    fabric: str
    spans_nodes: bool = False


def curve_groups(
    groups: Sequence[Mapping[str, Any]], num_ranks: int, fabric: str, nodes: Sequence[int]
) -> list[CurveGroup]:
    """Of a layout's groups (`GroupFabric` as dicts) one for each size and fabric; without any, all ranks of the pool.

    Where the ranks of the first share memory, the same ranks over gloo come last: the slow fabric to compare with.
    """
    found: dict[tuple[int, str], CurveGroup] = {}
    for group in sorted(groups, key=lambda group: group["axis"] == "dp"):  # which a step hardly crosses
        if group["axis"] != "world":
            made = CurveGroup(group["axis"], tuple(group["ranks"]), group["fabric"], bool(group["spans_nodes"]))
            found.setdefault((len(made.ranks), made.fabric), made)
    if not found and num_ranks > 1:
        everyone = tuple(range(num_ranks))
        over = fabric_of(everyone, fabric, nodes)
        found[num_ranks, over] = CurveGroup("world", everyone, over, spans_nodes(everyone, nodes))
    first = next((group for group in found.values() if group.fabric == "shm"), None)
    if first is not None:
        found.setdefault((len(first.ranks), "gloo"), CurveGroup(first.axis, first.ranks, "gloo"))
    return list(found.values())


class LinkBench:
    """serial: numbers that this pool has never been given; epoch: the pool's, as its ranks know it."""

    def __init__(
        self, ask: Ask, *, device: str = "cpu", dtype: str = "float32", threads: int = 1, check: bool = True,
        epoch: int = 1, serial: count[int] | None = None,
    ) -> None:  # fmt: skip
        self._ask, self._device, self._dtype, self._threads, self._check = ask, device, dtype, threads, check
        self._epoch, self._serial = epoch, serial or count(1)

    async def end(self) -> None:
        """Close what the last question had opened."""
        await self._ask(self._message((), "", "", 0, False, 0, 0))

    # ---- two ranks

    async def pairs(
        self, num_ranks: int, fabric: str, nodes: Sequence[int], on_row: OnRow = lambda each: None
    ) -> list[dict[str, Any]]:
        """A row for each two ranks, one pair at a time. fabric: within a node; nodes: of each rank, or none."""
        found = []
        for a, b in pairs_of(num_ranks):
            found.append(await self.pair(a, b, fabric_of((a, b), fabric, nodes), spans_nodes((a, b), nodes)))
            on_row(found[-1])
        return found

    async def pair(self, a: int, b: int, fabric: str, across: bool) -> dict[str, Any]:
        ranks = (a, b)
        first, wrong_first = await self._trips(ranks, fabric, SMALL_BYTES, 2, 5)
        once_s = 2 * way_ns(first) / 1e9
        small, wrong_small = await self._trips(
            ranks, fabric, SMALL_BYTES, num_rounds(once_s, SETTLE_S, 1000), num_rounds(once_s, SMALL_BUDGET_S, 200, 10)
        )
        probe, wrong_probe = await self._trips(ranks, fabric, PROBE_BYTES, 3, 5)
        num_bytes = large_bytes(way_ns(probe), self._device)
        expected_s = 2 * way_ns(probe) / 1e9 * num_bytes / PROBE_BYTES
        large, wrong_large = await self._trips(ranks, fabric, num_bytes, 2, num_rounds(expected_s, LARGE_BUDGET_S))
        wrong_small += wrong_first
        wrong = wrong_small + wrong_probe + wrong_large
        return pair_row(a, b, small, large, num_bytes, wrong=wrong, fabric=fabric, spans_nodes=across)

    async def _trips(
        self, ranks: tuple[int, int], fabric: str, num_bytes: int, num_warmup: int, rounds: int
    ) -> tuple[list[int], int]:
        message = self._message(ranks, fabric, PINGPONG, num_bytes, False, num_warmup, rounds)
        answers = await self._ask(message)
        return answers[ranks[0]].times_ns, sum(answers[rank].num_wrong for rank in ranks)

    # ---- collectives by size

    async def curve(
        self, group: CurveGroup, op: str, num_bytes: Sequence[int] = (), on_row: OnRow = lambda each: None
    ) -> list[dict[str, Any]]:
        """A row for each size, up to the one whose round would take too long; in place where it can be."""
        found: list[dict[str, Any]] = []
        expected_s = 0.001
        for size in num_bytes or CURVE_SIZES[self._device]:
            warmup = 2 if found else FIRST_WARMUP
            found.append(await self._size(group, op, size, warmup, num_rounds(expected_s, SIZE_BUDGET_S)))
            on_row(found[-1])
            expected_s = found[-1]["time_us"] / 1e6 * 4
            if expected_s > LONGEST_ROUND_S:
                break
        return found

    async def _size(self, group: CurveGroup, op: str, size: int, warmup: int, rounds: int) -> dict[str, Any]:
        in_place = op in BOTH_PLACES
        answers = await self._ask(self._message(group.ranks, group.fabric, op, size, in_place, warmup, rounds))
        timed = [answers[rank] for rank in group.ranks if answers[rank].times_ns]
        slowest = np.max([answer.times_ns for answer in timed], axis=0).tolist()
        return row(
            op, size, 2 if op == "sendrecv" else len(group.ranks), slowest,
            wrong=sum(answer.num_wrong for answer in timed), in_place=in_place, axis=group.axis,
            group_ranks=list(group.ranks), fabric=group.fabric, dtype=self._dtype,
        )  # fmt: skip

    def _message(
        self, ranks: Sequence[int], fabric: str, op: str, num_bytes: int, in_place: bool, warmup: int, rounds: int
    ) -> BenchLink:
        return BenchLink(
            self._epoch, next(self._serial), list(ranks), fabric, op, num_bytes, in_place, self._dtype, warmup, rounds,
            self._check, self._threads,
        )  # fmt: skip


def curve_fits(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The line of each operation of each group over each fabric."""
    by_group: dict[tuple[str, tuple[int, ...]], list[Mapping[str, Any]]] = {}
    for each in rows:
        by_group.setdefault((each["fabric"], tuple(each["group_ranks"])), []).append(each)
    return [
        {"fabric": fabric, "group_ranks": list(ranks), "axis": mine[0]["axis"], **line}
        for (fabric, ranks), mine in by_group.items()
        for line in fits(mine)
    ]
