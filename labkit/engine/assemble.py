"""A layout that stands, as the dispatcher needs it: pools of replicas, each replica with a scheduler of its own."""

from __future__ import annotations

from labkit.engine.blocks import BlockPool
from labkit.engine.bringup import Standing
from labkit.engine.pools import Pools, ReplicaPool
from labkit.engine.replica import Replica
from labkit.engine.scheduler import Scheduler, SchedulerConfig
from labkit.engine.settings import EngineSettings
from labkit.layout import Pool, block_tokens, pools_of
from labkit.model.spec import ModelSpec


def assemble(settings: EngineSettings, spec: ModelSpec, standing: Standing) -> Pools:
    """Replicas are numbered through all pools, in the order of the ranks."""
    blocks = iter(standing.num_blocks)
    pools: list[ReplicaPool] = []
    for index, pool in enumerate(pools_of(settings.layout)):
        first = sum(len(before.replicas) for before in pools)
        replicas = tuple(
            _replica(settings, spec, pool, index, first, place, next(blocks)) for place in range(pool.layout.dp)
        )
        pools.append(ReplicaPool(pool.role, pool.layout, pool.ranks, replicas))
    return Pools(pools, settings.router, settings.long_prompt_tokens)


def _replica(
    settings: EngineSettings, spec: ModelSpec, pool: Pool, pool_index: int, first: int, place: int, num_blocks: int
) -> Replica:
    layout = pool.layout
    config = SchedulerConfig(
        max_context=spec.max_positions,
        eos_ids=frozenset(spec.eos_token_ids),
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        admission=settings.admission,
        max_in_flight=layout.pp,
        prefills_only=pool.role == "prefill",
    )
    blocks = BlockPool(num_blocks, block_tokens(layout, settings.block_size), settings.prefix_cache)
    chain = pool.globally(layout.group_of("pp", layout.sampling_rank(place)))
    return Replica(
        first + place, pool.replicas[place], chain, Scheduler(config, blocks),
        pool=pool_index, index_in_pool=place, role=pool.role, layout=layout.slug,
    )  # fmt: skip
