"""From a snapshot to what the page draws of single axes (`frame_axes`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from labkit.layout import Deployment, Layout
from labkit.show import frame_axes as a

Snapshot = dict[str, Any]


@lru_cache(maxsize=256)
def name_of(layout: str) -> str:
    """dp2xtp2 → DP2×TP2; what cannot be read is its own name."""
    try:
        return str(Deployment.parse(layout))
    except ValueError:
        return layout


def gantt_of(snapshot: Snapshot) -> a.Gantt | None:
    return msgspec.convert(snapshot["gantt"], a.Gantt) if snapshot["gantt"] else None


def experts_of(snapshot: Snapshot) -> a.Experts | None:
    """Load as the last seconds' steps had it; who owns what, as the server places them."""
    if not snapshot["experts"]:
        return None
    experts = msgspec.convert(snapshot["experts"], a.Experts)
    placements = ((snapshot["state"] or {}).get("experts") or {}).get("placements") or [[]]
    experts.owners = _owners(placements[0], len(experts.tokens))
    return experts


def _owners(placement: Sequence[Sequence[int]], num_experts: int) -> list[list[int]]:
    """placement: by rank of the expert group, the experts of the first MoE layer that it holds."""
    if len(placement) < 2:
        return []
    return [[rank for rank, held in enumerate(placement) if expert in held] for expert in range(num_experts)]


def kv_of(state: Snapshot, tokens_per_request: float | None) -> list[a.Kv]:
    return [
        _kv(i, replica, _pool_layout(state, replica), tokens_per_request)
        for i, replica in enumerate(state.get("replicas", []))
    ]


def _kv(index: int, replica: Snapshot, layout: str, tokens_per_request: float | None) -> a.Kv:
    resident, total = _tokens(replica)
    free = total - resident
    return a.Kv(
        replica=index,
        role=replica.get("role", "any"),
        resident_tokens=resident,
        total_tokens=total,
        running=replica["running"],
        shared_by=Layout.parse(layout).dcp if layout else 1,
        more_requests=int(free // tokens_per_request) if tokens_per_request else None,
    )


def _tokens(replica: Snapshot) -> tuple[int, int]:
    """A block's tokens are those that the ranks which share out positions hold of it together."""
    block_tokens = replica.get("kv_block_tokens", 1)
    return replica["kv_used_blocks"] * block_tokens, replica["kv_total_blocks"] * block_tokens


def _pool_layout(state: Snapshot, replica: Snapshot) -> str:
    pools = state.get("pools") or []
    index = replica.get("pool", 0)
    return str(pools[index]["layout"]) if index < len(pools) else str(state.get("layout", ""))


def pools_of(state: Snapshot) -> list[a.PoolInfo]:
    """Empty for a plain layout: one pool that does everything is no news."""
    pools = state.get("pools") or []
    if len(pools) < 2:
        return []
    return [_pool(i, pool, state.get("replicas", [])) for i, pool in enumerate(pools)]


def _pool(index: int, pool: Snapshot, replicas: Sequence[Snapshot]) -> a.PoolInfo:
    mine = [replica for replica in replicas if replica.get("pool", 0) == index]
    tokens = [_tokens(replica) for replica in mine]
    return a.PoolInfo(
        role=pool["role"],
        layout=pool["layout"],
        layout_name=pool.get("layout_name") or name_of(pool["layout"]),
        ranks=list(pool["ranks"]),
        waiting=sum(replica["waiting"] for replica in mine),
        running=sum(replica["running"] for replica in mine),
        resident_tokens=sum(resident for resident, _ in tokens),
        total_tokens=sum(total for _, total in tokens),
    )


def handoff_of(snapshot: Snapshot) -> a.Handoff | None:
    """Of the requests that have ended lately under this layout."""
    handoff = snapshot["handoff"]
    if not handoff:
        return None
    num, ms = handoff["num"], handoff["ms"]
    return a.Handoff(num, handoff["bytes"] / num, ms["p50"], ms["p95"], handoff["mib_per_s"])


def crossings_of(snapshot: Snapshot) -> list[a.Crossing]:
    return msgspec.convert(snapshot["crossings"], list[a.Crossing])
