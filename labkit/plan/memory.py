"""What every rank of a layout holds, how many KV blocks are left, and what that means for so many requests at once.

**Does not fit** and **will queue** are different answers: weights that leave no room for one request are a fault of the
layout, a cache that is full is a queue. Weights are counted tensor by tensor (`labkit.layout.slices`), the rest from
what the engine does (`labkit.plan.memory_terms`), blocks as vLLM pages them (`labkit.plan.kv_groups`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from labkit.layout import AnyLayout, Layout, Pool, experts, is_last_stage, pools_of, rank_memory
from labkit.layout.legality import reasons_against
from labkit.layout.slices import counted_tensors, slice_bytes, slice_tensor
from labkit.model.shapes import ModelSpec
from labkit.model.tensors import EMBEDDING, EXPERTS, HEAD
from labkit.plan import memory_terms as terms
from labkit.plan.chips import HOPPER, Chip, chip_of
from labkit.plan.hardware import Hardware
from labkit.plan.kv_groups import KvGroups, kv_groups
from labkit.plan.work import EngineSettings
from labkit.said import in_turn, say

GB = 1e9


@dataclass(frozen=True)
class RankPlan:
    """Bytes of one rank; the parts of `weights` and the numbers add up to the device's memory, when it fits."""

    rank: int
    weights: dict[str, int]
    replicated: int
    """Of the weights, what other ranks of the same replica's stage hold as well. (Replicas repeat all of them.)"""
    activations: int
    workspace: int
    graphs: int
    communicators: int
    reserve: int
    """The share that gpu_memory_utilization leaves alone, and the driver's."""
    kv: int
    free: int
    """What is left of the budget when the last whole block is taken; negative: what is missing."""

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def beside(self) -> int:
        """All but weights and KV."""
        return self.activations + self.workspace + self.graphs + self.communicators + self.reserve


@dataclass(frozen=True, slots=True)
class Verdict:
    """`answer`: "fits", "will queue" or "does not fit"; `most`: requests of that length that hold KV at once, of the
    whole deployment; as text, a sentence with the figures."""

    answer: str
    most: int
    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class PoolPlan:
    """One pool of a deployment: a layout alone is one pool."""

    pool: Pool
    groups: KvGroups
    """Of the rank that has the fewest blocks."""
    kv_blocks: int
    """Of one replica; vLLM keeps one of them empty."""

    def requests(self, tokens_each: int) -> int:
        """Of one replica."""
        each = self.groups.blocks(tokens_each)
        return max(0, self.kv_blocks - 1) // each if each else 0


@dataclass(frozen=True)
class MemoryPlan:
    """Of a deployment. `kv_blocks`: of a replica, the least of its ranks, and of the pools that decode; 0 when it does
    not fit. `reason`: a sentence when it does not."""

    layout: AnyLayout
    ranks: tuple[RankPlan, ...]
    block_bytes: int
    kv_blocks: int
    block_size: int
    fits: bool
    reason: str
    pools: tuple[PoolPlan, ...]
    settings: EngineSettings

    @property
    def kv_tokens(self) -> int:
        """Tokens of one very long request that a replica's cache holds."""
        full = self._serving[0].groups.full
        return self.kv_blocks // full * self.block_size if full else 0

    @property
    def _serving(self) -> tuple[PoolPlan, ...]:
        """Pools in which a request's KV stays while it is answered."""
        decoding = tuple(plan for plan in self.pools if plan.pool.role != "prefill")
        return decoding or self.pools

    def blocks_each(self, tokens_each: int) -> int:
        """Blocks that a request of that length takes: window layers and states are counted."""
        return self._serving[0].groups.blocks(tokens_each)

    def most_requests(self, tokens_each: int) -> int:
        """How many requests of that length hold KV at once, of the whole deployment."""
        if not self.fits:
            return 0
        return sum(plan.requests(tokens_each) * plan.pool.layout.dp for plan in self._serving)

    def verdict(self, concurrency: int, tokens_each: int) -> Verdict:
        """Whether `concurrency` requests of `tokens_each` (prompt and answer) are served at once, and what else."""
        if not self.fits:
            return Verdict("does not fit", 0, self.reason)
        most = self.most_requests(tokens_each)
        if not most:
            return Verdict("does not fit", 0, self._one_is_too_long(tokens_each))
        replicas = sum(plan.pool.layout.dp for plan in self._serving)
        slots = self.settings.max_num_seqs * replicas
        if concurrency <= min(most, slots):
            told = f"{concurrency} requests of {tokens_each:,} tokens fit: KV holds {most}, {slots} may run at once."
            return Verdict("fits", most, told)
        return Verdict("will queue", most, _queue(concurrency, tokens_each, most, slots))

    def _one_is_too_long(self, tokens_each: int) -> str:
        longest = max(self.kv_tokens - self.block_size, 0)
        return (
            f"One request of {tokens_each:,} tokens needs {self.blocks_each(tokens_each):,} KV blocks and a replica of "
            f"{self.layout} has {self.kv_blocks:,}: shorten requests to {longest:,} tokens, or share the model over "
            f"more ranks."
        )


def _queue(concurrency: int, tokens_each: int, most: int, slots: int) -> str:
    if slots < most:
        return (
            f"{concurrency} requests at once: max_num_seqs lets {slots} run, {concurrency - slots} wait although KV "
            f"would hold {most} of {tokens_each:,} tokens; raise max_num_seqs."
        )
    waits = concurrency - most
    return (
        f"{most} requests of {tokens_each:,} tokens hold KV at once, so of {concurrency} {waits} wait for one to "
        f"finish (or are preempted and computed again): TTFT grows by about {waits / most:.2g} of an answer's time, "
        f"TPOT stays as it is at {most}."
    )


# ---- counting


def memory_plan(
    layout: AnyLayout, spec: ModelSpec, device_memory: int, settings: EngineSettings, *, chip: Chip = HOPPER
) -> MemoryPlan:
    """Counts every rank of `layout` on GPUs of `device_memory` bytes each. `settings.policy` says whose engine: vLLM,
    or labkit's own, which takes `device_memory` as the budget of weights and KV (--memory-per-rank).

    An illegal layout does not fit, with the model's reasons. Raises ValueError for settings that nobody can read.
    """
    plans: list[PoolPlan] = []
    ranks: list[RankPlan] = []
    problems: list[str] = []
    for pool in pools_of(layout):
        refused = reasons_against(pool.layout, spec)
        if refused:
            return _refused(layout, settings, in_turn(*refused))
        counted = list(_pool_ranks(pool.layout, spec, device_memory, settings, chip))
        least = min(counted, key=lambda each: each[2])
        plans.append(PoolPlan(pool, least[1], max(0, least[2])))
        ranks += [_with_kv(plan, groups, max(0, least[2]), pool) for plan, groups, _ in counted]
        problems += _problems(pool, spec, settings, device_memory, plans[-1], [plan for plan, _, _ in counted])
    serving = [plan for plan in plans if plan.pool.role != "prefill"] or plans
    tightest = min(serving, key=lambda plan: plan.kv_blocks)
    return MemoryPlan(
        layout, tuple(ranks), tightest.groups.block_bytes, 0 if problems else tightest.kv_blocks,
        tightest.groups.block_size, not problems, in_turn(*problems), tuple(plans), settings,
    )  # fmt: skip


def memory_on(layout: AnyLayout, spec: ModelSpec, hardware: Hardware, settings: EngineSettings) -> MemoryPlan:
    """`memory_plan` with the memory and the engine's kernels of that hardware's GPUs."""
    device = hardware.device
    return memory_plan(layout, spec, device.memory_bytes, settings, chip=chip_of(device.name))


def _refused(layout: AnyLayout, settings: EngineSettings, reason: str) -> MemoryPlan:
    empty = KvGroups(settings.block_size, 0, 1, 0, 0, 0)
    pools = tuple(PoolPlan(pool, empty, 0) for pool in pools_of(layout))
    told = say("{layout} is not allowed: {reason}", layout=layout, reason=reason)
    return MemoryPlan(layout, (), 0, 0, settings.block_size, False, told, pools, settings)


def _pool_ranks(
    layout: Layout, spec: ModelSpec, device_memory: int, settings: EngineSettings, chip: Chip
) -> Iterator[tuple[RankPlan, KvGroups, int]]:
    """Each rank with its groups and the blocks that its own memory leaves; ranks that hold alike are counted once."""
    seen: dict[tuple[int, int], tuple[RankPlan, KvGroups, int]] = {}
    for rank in range(layout.world_size):
        alike = (layout.coords(rank).pp, len(experts(layout, spec, rank)))
        if alike not in seen:
            seen[alike] = _rank(layout, spec, rank, device_memory, settings, chip)
        plan, groups, blocks = seen[alike]
        yield replace(plan, rank=rank), groups, blocks


def _rank(
    layout: Layout, spec: ModelSpec, rank: int, device_memory: int, settings: EngineSettings, chip: Chip
) -> tuple[RankPlan, KvGroups, int]:
    weights, replicated = _weights(layout, spec, rank)
    groups = kv_groups(layout, spec, rank, settings)
    if settings.policy == "labkit":
        bare = RankPlan(rank, weights, replicated, 0, 0, 0, 0, 0, 0, 0)
        return _own_rank(layout, spec, bare, groups, device_memory, settings)
    outside = terms.outside_torch(layout, rank, chip)
    requested = -(-device_memory * round(settings.gpu_memory_utilization * 10_000) // 10_000)
    workspace = (
        chip.cublas_workspace + terms.expert_workspace(layout, spec, settings) + terms.rope_cache(spec)
        + terms.padding(spec, layout, weights.get(EXPERTS, 0))
    )  # fmt: skip
    plan = RankPlan(
        rank, weights, replicated, terms.torch_peak(layout, spec, rank, settings, chip), workspace,
        terms.graphs(layout, spec, rank, settings, chip), terms.communicators(layout, spec, chip),
        device_memory - requested + outside, 0, 0,
    )  # fmt: skip
    left = device_memory - plan.beside - plan.weight_bytes
    return replace(plan, free=left), groups, left // max(1, groups.block_bytes)


def _own_rank(
    layout: Layout, spec: ModelSpec, plan: RankPlan, groups: KvGroups, budget: int, settings: EngineSettings
) -> tuple[RankPlan, KvGroups, int]:
    """labkit's engine: the budget is of weights and KV alone, one block is kept to spare, and no more are made than
    full sequences need. A tied head is laid out once more beside the embedding, as a CPU multiplies by it.
    """
    weights = dict(plan.weights)
    if spec.tie_word_embeddings and EMBEDDING in weights and is_last_stage(layout, plan.rank):
        weights[HEAD] = weights[EMBEDDING]
    plan = replace(plan, weights=weights, activations=terms.own_activations(layout, spec, settings))
    left = budget - plan.weight_bytes
    most = settings.max_num_seqs * -(-spec.max_positions // groups.block_size)
    return replace(plan, free=left), groups, min(left // max(1, groups.block_bytes) - 1, most)


@lru_cache(maxsize=2048)
def _counted_weights(layout: Layout, spec: ModelSpec, rank: int) -> tuple[tuple[tuple[str, int], ...], int]:
    """(part, bytes) and the bytes of what others in the stage hold too."""
    replicated = 0
    for tensor, times in counted_tensors(layout, spec, rank):
        piece = slice_tensor(layout, spec, rank, tensor)
        if piece.replicated_over > 1:
            replicated += times * slice_bytes(spec, tensor, piece, spec.dtype_bytes)
    return tuple(rank_memory(layout, spec, rank, spec.dtype_bytes).items()), replicated


def _weights(layout: Layout, spec: ModelSpec, rank: int) -> tuple[dict[str, int], int]:
    parts, replicated = _counted_weights(layout, spec, rank)
    return dict(parts), replicated


def _with_kv(plan: RankPlan, groups: KvGroups, kv_blocks: int, pool: Pool) -> RankPlan:
    """A replica has as many blocks as its tightest rank, on all of them. Ranks become those of the deployment."""
    kv = kv_blocks * groups.block_bytes
    return replace(plan, rank=pool.first_rank + plan.rank, kv=kv, free=plan.free - kv)


def _problems(
    pool: Pool, spec: ModelSpec, settings: EngineSettings, device_memory: int, plan: PoolPlan, ranks: list[RankPlan]
) -> Iterator[str]:
    """Sentences why the pool does not serve a single request."""
    longest = settings.max_model_len or plan.groups.block_size
    if plan.requests(longest):
        return
    fullest = min(ranks, key=lambda each: each.free)
    where = say("rank {rank} of {layout}", rank=pool.first_rank + fullest.rank, layout=pool.layout)
    head = {"model": spec.name, "where": where if len(ranks) > 1 else pool.layout, "memory": device_memory / GB,
            "weights": fullest.weight_bytes / GB, "beside": fullest.beside / GB}  # fmt: skip
    if fullest.free < 0:
        yield say(
            "{model} does not fit {where}: weights {weights:.1f} GB and {beside:.1f} GB beside them (activations, "
            "workspace, graphs, communicators, reserve) of {memory:.1f} GB leave nothing: {lacking:.1f} GB too little. "
            "Share it over more ranks or take fewer bits.", **head, lacking=-fullest.free / GB,
        )  # fmt: skip
        return
    yield say(
        "{model} does not fit {where}: weights {weights:.1f} GB and {beside:.1f} GB beside them (activations, "
        "workspace, graphs, communicators, reserve) of {memory:.1f} GB leave {free:.2f} GB for KV, {blocks:,} blocks, "
        "and a request of {longest:,} tokens needs {needed:,} with one kept empty.", **head, free=fullest.free / GB,
        blocks=plan.kv_blocks, longest=longest, needed=plan.groups.blocks(longest),
    )  # fmt: skip
