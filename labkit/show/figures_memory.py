"""A rank's memory sorted by who else holds it: the difference between splitting a model and copying it.

What each rank used is measured; that another rank holds the same slice follows from the layout (`holdings`).
"""

from __future__ import annotations

import enum
from typing import Any

from labkit.measure.memory import held, pool_of


class Holder(enum.Enum):
    """In the order in which a bar is stacked."""

    ALONE = "weights that no other rank has"
    SHARED = "weights that another rank has too"
    KV = "KV cache"
    FREE = "free"


def held_by_rank(summary: dict[str, Any]) -> dict[int, dict[Holder, int]]:
    """Rank → bytes by holder, from a run's `memory_bytes`. Empty for a foreign server."""
    return {rank["rank"]: _sorted(rank, summary) for rank in summary.get("memory_bytes") or []}


def _sorted(memory: dict[str, Any], summary: dict[str, Any]) -> dict[Holder, int]:
    """A packed copy of a tied head goes with the embedding; of a model that is not known here only the replicas count.
    """
    parts = memory.get("weights_by_part") or {"all": memory["weights"]}
    copies = {part: holding.copies for part, holding in held(summary, memory["rank"]).items()}
    pool = pool_of(summary, memory["rank"])
    found = {Holder.ALONE: 0, Holder.SHARED: 0, Holder.KV: memory["kv"], Holder.FREE: memory["free"]}
    for part, num_bytes in parts.items():
        shared = copies.get(part, pool.layout.dp) > 1
        found[Holder.SHARED if shared else Holder.ALONE] += num_bytes
    return found
