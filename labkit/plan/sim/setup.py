"""The simulated engine, made as the running one is: pools of replicas by role, each with a scheduler and a pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from labkit.engine.pools import Pools, ReplicaPool
from labkit.engine.scheduler import SchedulerConfig
from labkit.layout.deployment import AnyLayout, Pool, pools_of
from labkit.plan.sim.cost import DecodeTable
from labkit.plan.sim.pipeline import StagedScheduler, StagedUnit
from labkit.plan.sim.pool import CountedPool, KeyedPool
from labkit.plan.sim.replica import SimReplica
from labkit.plan.sim.scheduler import SimScheduler
from labkit.plan.sim.solo import SoloUnit
from labkit.plan.sim.unit import Unit
from labkit.plan.work import EngineSettings, StepCost

UNLIMITED = 1 << 40
EXACT_REPLICAS = 64
"""Up to so many the router sees all work as it is at that instant. Beyond, what a request does past its expected length
counts from the next arrival or end at its replica: the price of a million requests in minutes."""
AnyUnit = Unit | StagedUnit


@dataclass(frozen=True, slots=True)
class Options:
    """How the simulation goes about it, beside what an engine is set to."""

    routing: str = "least-work"
    """One of the engine's router's policies, or `least-requests` (see `labkit.plan.sim.routing`)."""
    long_prompt_tokens: int = 1024
    """With a pool for long prompts: those of so many tokens or more go there."""
    window: int = 0
    """What layers with a sliding window look at; 0: there are none."""
    ahead: bool = False
    """The next step is planned while one is under way (vLLM's async scheduling)."""
    jump: bool = True
    """Take runs of decode steps at once. Off: one step at a time, for comparison."""
    shares: bool = False
    """Prompts begin alike: blocks are kept one by one, so that a prefix is found."""


def set_up(
    layout: AnyLayout, cost: StepCost | Mapping[str, StepCost], kv_blocks: int | Mapping[str, int],
    settings: EngineSettings, options: Options,
) -> tuple[Pools, list[AnyUnit]]:  # fmt: skip
    """cost, kv_blocks: of a replica; by role where pools differ. Raises ValueError when there is no room for KV."""
    pools, units, index = [], [], 0
    parts = pools_of(layout)
    num_replicas = sum(part.layout.dp for part in parts)
    for number, part in enumerate(parts):
        part_cost = cost[part.role] if isinstance(cost, Mapping) else cost
        blocks = kv_blocks[part.role] if isinstance(kv_blocks, Mapping) else kv_blocks
        if blocks < 1:
            raise ValueError(
                f"{part.layout} has no block for KV: its weights leave no room. Choose a layout that splits them more."
            )
        replicas = []
        for place, ranks in enumerate(part.replicas):
            scheduler = _scheduler(part, blocks, settings, options, num_replicas)
            replicas.append(
                SimReplica(
                    index, ranks, ranks[:1], scheduler, pool=number, index_in_pool=place, role=part.role,
                    layout=part.layout.slug,
                )
            )  # fmt: skip
            index += 1
        pools.append(ReplicaPool(part.role, part.layout, part.ranks, tuple(replicas)))
        together = [replicas] if part.layout.attention_dp else [[replica] for replica in replicas]
        table = DecodeTable(part_cost.seconds, options.window)
        units += [_unit(group, part, part_cost, options, table) for group in together]
    routing = "least-work" if options.routing == "least-requests" else options.routing
    return Pools(pools, routing, options.long_prompt_tokens), units


def _scheduler(
    part: Pool, blocks: int, settings: EngineSettings, options: Options, num_replicas: int
) -> SimScheduler | StagedScheduler:
    config = SchedulerConfig(
        max_context=settings.max_model_len or UNLIMITED,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        admission=settings.policy,
        max_in_flight=part.layout.pp,
        prefills_only=part.role == "prefill",
    )
    kind = KeyedPool if options.shares else CountedPool
    pool = kind(blocks, settings.block_size, settings.enable_prefix_caching)
    if part.layout.pp > 1:
        return StagedScheduler(config, pool, num_replicas > 1)
    return SimScheduler(config, pool, num_replicas > 1, options.ahead, num_replicas > EXACT_REPLICAS)


def _unit(replicas: list[SimReplica], part: Pool, cost: StepCost, options: Options, table: DecodeTable) -> AnyUnit:
    unit: AnyUnit
    if part.layout.pp > 1:
        unit = StagedUnit(replicas, cost, window=options.window, jump=options.jump)
    else:
        kind = Unit if len(replicas) > 1 else SoloUnit
        unit = kind(replicas, cost, table, window=options.window, ahead=options.ahead, jump=options.jump)
    for replica in replicas:
        replica.unit = unit
    return unit
