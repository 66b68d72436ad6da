"""What the page draws of single axes: stages, experts, KV, pools, and what crosses between ranks.

Each is empty or None in a frame of a layout that does not use the axis; its panel is then not shown.
"""

from __future__ import annotations

import msgspec


class StageRow(msgspec.Struct):
    replica: int
    stage: int
    ranks: list[int]
    bars: list[list[float]]
    """A step each, in ms: when it began in the span, then how long it was idle, computed, and was in collectives."""


class Gantt(msgspec.Struct):
    span_ms: float
    rows: list[StageRow]
    clock_ms: float | None = None
    """How sure instants of different hosts are against each other; None: one clock, or not known."""


class ExpertRank(msgspec.Struct):
    """Sums over the last seconds."""

    rank: int
    rows: int
    """Tokens that its experts computed, for whomever."""
    sent_bytes: int
    compute_ms: float
    wait_ms: float
    """In combines, for the busiest rank."""


class Experts(msgspec.Struct):
    tokens: list[int]
    """By expert, over the last seconds, all MoE layers together."""
    ranks: list[ExpertRank]
    num_dropped: int
    owners: list[list[int]] = []
    """By expert: which rank of the expert group holds it (several: copies); empty when tp cuts every expert."""


class Kv(msgspec.Struct):
    """Of one replica. Tokens count what its ranks hold together, each token once."""

    replica: int
    role: str
    resident_tokens: int
    total_tokens: int
    running: int
    shared_by: int = 1
    """How many ranks share out one sequence's positions (dcp)."""
    more_requests: int | None = None
    """How many of the present mean length would fit in what is free."""


class PoolInfo(msgspec.Struct):
    """Ranks with a role; `waiting`, `running` and KV tokens are sums over the pool's replicas."""

    role: str
    layout: str
    layout_name: str
    ranks: list[int]
    waiting: int = 0
    running: int = 0
    resident_tokens: int = 0
    total_tokens: int = 0


class Handoff(msgspec.Struct):
    """KV that goes from the prefill pool to the decode pool, a request a time."""

    num: int
    bytes: float
    """Mean of one."""
    p50_ms: float | None
    p95_ms: float | None
    mib_per_s: float
    """All bytes over all transfers' time."""


class CrossingOp(msgspec.Struct):
    op: str
    per_s: float
    bytes: float


class Crossing(msgspec.Struct):
    """One axis in one phase: how often a rank hands something over, and how many bytes at a time (mean)."""

    axis: str
    phase: str
    per_s: float
    bytes: float
    ops: list[CrossingOp] = []
