"""Giving living ranks a layout: configure all of them at once, agree on the KV blocks, warm, ready.

Every rank of the pool takes part, for an idle one has weights to drop. A replica's pool of blocks is the
minimum over its ranks. What the budget refuses comes back as a sentence that names the rank, the numbers,
and layouts that fit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from labkit.engine.messages import AllocateKV, Configure, Configured, EngineMessage, Ready
from labkit.engine.settings import EngineSettings
from labkit.engine.watchdog import SWITCH_TIMEOUT_S
from labkit.layout import (
    AnyLayout,
    Deployment,
    LayerPlacements,
    Layout,
    Pool,
    kv_bytes_per_token,
    legal_layouts,
    pools_of,
    rank_memory,
)
from labkit.measure.records import MemoryRecord
from labkit.model.spec import ModelSpec


class SwitchRefused(ValueError):
    """The layout cannot stand on these ranks; the message says which rank, the numbers, and what would."""


class RankPool(Protocol):
    """What the engine needs of `labkit.cluster.pool.Pool`."""

    def send(self, rank: int, message: EngineMessage) -> None: ...

    def declare_hung(self, ranks: Sequence[int], what: str, timeout_s: float) -> None: ...


@dataclass(frozen=True)
class SwitchReport:
    layout: AnyLayout
    ready_s: float
    parts: dict[str, float]
    """Seconds: drain (steps in flight), load (weights), groups, warm; each the slowest rank's."""


@dataclass(frozen=True)
class Standing:
    """A layout that stands: blocks of each replica (pool after pool), every rank's memory, and what it took."""

    num_blocks: list[int]
    memory: list[MemoryRecord]
    parts: dict[str, float]


class Replies:
    """One answer of one kind from each of several ranks."""

    def __init__(self, ranks: Iterable[int], kind: type[Any], epoch: int) -> None:
        self._missing, self._kind, self._epoch = set(ranks), kind, epoch
        self._got: dict[int, Any] = {}
        self._all: asyncio.Future[dict[int, Any]] = asyncio.get_running_loop().create_future()

    def add(self, rank: int, message: Any) -> None:
        if isinstance(message, self._kind) and message.epoch == self._epoch:
            self._missing.discard(rank)
            self._got[rank] = message
            if not self._missing and not self._all.done():
                self._all.set_result(self._got)

    def fail(self, error: Exception) -> None:
        if not self._all.done():
            self._all.set_exception(error)

    async def ask(self, pool: RankPool, questions: Mapping[int, Any], what: str, timeout_s: float) -> dict[int, Any]:
        """All answers to `what`. Ranks that keep silent for so long are hung: the pool fails, and `fail` is called."""

        def lose_patience() -> None:
            pool.declare_hung(sorted(self._missing), what, timeout_s)

        for rank, question in questions.items():
            pool.send(rank, question)
        hung = asyncio.get_running_loop().call_later(timeout_s, lose_patience)
        try:
            return await self._all
        finally:
            hung.cancel()


class BringUp:
    """One attempt. The engine hands every `Configured` and `Ready` to `add`, and a rank's end to `fail`."""

    def __init__(
        self, pool: RankPool, num_ranks: int, spec: ModelSpec, settings: EngineSettings, epoch: int,
        nodes: Sequence[int] = (), placements: LayerPlacements = (),
    ) -> None:  # fmt: skip
        self._placements = placements
        self._pool, self._num_ranks, self._spec = pool, num_ranks, spec
        self._settings, self._epoch, self._nodes = settings, epoch, nodes
        self._replies: Replies | None = None
        self._error: Exception | None = None

    def add(self, rank: int, message: Configured | Ready) -> None:
        if self._replies is not None:
            self._replies.add(rank, message)

    def fail(self, error: Exception) -> None:
        self._error = error
        if self._replies is not None:
            self._replies.fail(error)

    async def run(self, model: str, threads: int) -> Standing:
        """Raises SwitchRefused, or what `fail` was given."""
        configures = {rank: self._configure(model, threads, self._pool_of(rank)) for rank in range(self._num_ranks)}
        configured = await self._ask(configures, Configured)
        self._check(configured)
        replicas = [ranks for pool in pools_of(self._settings.layout) for ranks in pool.replicas]
        num_blocks = [min(configured[rank].num_blocks for rank in ranks) for ranks in replicas]
        allocate = {
            rank: AllocateKV(self._epoch, blocks)
            for ranks, blocks in zip(replicas, num_blocks, strict=True)
            for rank in ranks
        }
        ready = await self._ask(allocate, Ready)
        parts = {
            "load": max(answer.load_s for answer in configured.values()),
            "groups": max(answer.groups_s for answer in configured.values()),
            "warm": max(answer.warm_s for answer in ready.values()),
        }
        memory = [_memory_record(rank, ready.get(rank, configured[rank])) for rank in sorted(configured)]
        return Standing(num_blocks, memory, parts)

    async def _ask(self, questions: dict[int, Any], kind: type[Configured] | type[Ready]) -> dict[int, Any]:
        if self._error is not None:
            raise self._error
        self._replies = Replies(questions, kind, self._epoch)
        return await self._replies.ask(self._pool, questions, "a switch of layout", SWITCH_TIMEOUT_S)

    def _pool_of(self, rank: int) -> Pool:
        """An idle rank is told of the first pool, in which it has no place."""
        pools = pools_of(self._settings.layout)
        return next((pool for pool in pools if rank in pool.ranks), pools[0])

    def _configure(self, model: str, threads: int, pool: Pool) -> Configure:
        settings = self._settings
        return Configure(
            epoch=self._epoch,
            layout=pool.layout.slug,
            model=model,
            seed=settings.seed,
            dtype=settings.dtype,
            memory_bytes=settings.memory_per_rank,
            block_size=settings.block_size,
            max_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            threads=threads,
            fabric=settings.fabric,
            record=settings.record,
            graphs=settings.graphs,
            expert_capacity=settings.expert_capacity,
            placements=[[list(experts) for experts in layer] for layer in self._placements],
            nodes=list(self._nodes),
            first_rank=pool.first_rank,
            deployment=settings.layout.slug if isinstance(settings.layout, Deployment) else "",
        )

    def _check(self, configured: dict[int, Configured]) -> None:
        refusals = [answer for answer in configured.values() if answer.error]
        if refusals and (not self._settings.memory_per_rank or isinstance(self._settings.layout, Deployment)):
            raise SwitchRefused(refusals[0].error)  # each layout's own default is its ranks' business
        if refusals:
            weights = max(answer.memory.weights for answer in refusals)
            fitting = layouts_that_fit(self._spec, self._settings, self._num_ranks, weights)
            raise SwitchRefused(f"{refusals[0].error} {_fitting_sentence(fitting, self._num_ranks)}")


def layouts_that_fit(
    spec: ModelSpec, settings: EngineSettings, num_ranks: int, weights_bytes: int
) -> list[Layout]:
    """Layouts that this engine runs and whose fullest rank has room for its weights and two KV blocks.

    weights_bytes: what the weights really took on a rank of `settings.layout`, which was refused. A backend
    may keep more than the tensors (a packed copy of a tied head): others are expected to do so in proportion.
    """
    budget, refused = settings.memory_per_rank, settings.layout
    assert isinstance(refused, Layout)
    excess = max(1.0, weights_bytes / _fullest_weights(refused, spec, settings))
    return [
        layout
        for layout in legal_layouts(spec, num_ranks, engine=True)
        if layout != refused and budget >= _needed(layout, spec, settings, excess)
    ]


def _fullest_weights(layout: Layout, spec: ModelSpec, settings: EngineSettings) -> int:
    ranks = layout.replica_ranks(0)
    return max(sum(rank_memory(layout, spec, rank, settings.dtype_bytes).values()) for rank in ranks)


def _needed(layout: Layout, spec: ModelSpec, settings: EngineSettings, excess: float) -> float:
    """Weights and two KV blocks of the rank that needs most: stages differ in both."""
    dtype_bytes, num_tokens = settings.dtype_bytes, 2 * settings.block_size
    return max(
        sum(rank_memory(layout, spec, rank, dtype_bytes).values()) * excess
        + num_tokens * kv_bytes_per_token(layout, spec, rank, dtype_bytes)
        for rank in layout.replica_ranks(0)
    )


def _fitting_sentence(fitting: Sequence[Layout], num_ranks: int) -> str:
    if not fitting:
        return f"No layout of {num_ranks} rank{'s' * (num_ranks > 1)} fits this budget."
    return f"Layouts that fit: {', '.join(map(str, fitting))}."


def _memory_record(rank: int, answer: Configured | Ready) -> MemoryRecord:
    memory = answer.memory
    parts = memory.weights_by_part
    return MemoryRecord(rank, memory.weights, memory.kv, memory.other, memory.free, parts, memory.beside)
