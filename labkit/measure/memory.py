"""A rank's memory part by part, counted beside measured: what a split divides, what it copies, what it leaves alone.

Counted is arithmetic over the model's shapes and the layout (weights and KV exactly, activations as the widest moment
of a full step); measured is what the rank reported. Where a backend cannot measure a part it is None, never 0: a CPU's
allocator keeps no books of peaks, workspaces or slack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labkit.layout import (
    Holding,
    Layout,
    Pool,
    block_tokens,
    holdings,
    kv_bytes_per_token,
    pools_of,
    read_layout,
    stored_block,
)
from labkit.layout.holdings import KV
from labkit.model.spec import DTYPE_BYTES, ModelSpec, load_spec

WEIGHTS = ("whole", "split", "replicated")
BESIDE = ("activations", "workspace", "graphs", "slack")
"""What an allocator holds besides weights and KV: the peak of a full step above what stands, buffers that stand, the
pools of CUDA graphs, and what was reserved and is not in use."""
LOGIT_BYTES = 4


@dataclass(frozen=True)
class Item:
    """`kind`: of weights and KV whole (one rank has all), split (another rank has another slice) or replicated
    (another rank has the same slice); else empty. None: cannot be counted, or cannot be measured here.
    """

    name: str
    kind: str
    counted: int | None
    measured: int | None

    @property
    def difference(self) -> int | None:
        """Measured minus counted."""
        return None if self.counted is None or self.measured is None else self.measured - self.counted

    @property
    def bytes(self) -> int | None:
        return self.counted if self.measured is None else self.measured


@dataclass(frozen=True)
class RankMemory:
    rank: int
    items: list[Item]

    def of(self, name: str) -> Item | None:
        return next((item for item in self.items if item.name == name), None)

    def weights(self, kind: str) -> int:
        """Measured bytes of weights of one of WEIGHTS."""
        return sum(item.bytes or 0 for item in self.items if item.kind == kind and item.name != KV)


@dataclass(frozen=True)
class MemoryAccount:
    """Every rank of a run's layout. Shown by its own repr."""

    label: str
    ranks: list[RankMemory]

    @property
    def unmeasured(self) -> list[str]:
        return [item.name for item in self.ranks[0].items if item.measured is None] if self.ranks else []

    @property
    def _kv_uncounted(self) -> bool:
        return any(item.name == KV and item.counted is None for rank in self.ranks for item in rank.items)

    def largest(self, name: str) -> int | None:
        """Of a part, the most that a rank holds: it is the fullest rank that decides what fits."""
        found = [item.bytes for rank in self.ranks if (item := rank.of(name)) and item.bytes is not None]
        return max(found, default=None)

    def to_dict(self) -> dict[str, Any]:
        rows = [
            {"rank": rank.rank, "part": i.name, "kind": i.kind, "counted": i.counted, "measured": i.measured}
            for rank in self.ranks
            for i in rank.items
        ]
        return {"layout": self.label, "rows": rows}

    def __repr__(self) -> str:
        if not self.ranks:
            return f"{self.label}: the server told nothing of its memory."
        head = f"{'rank':>4}  {'part':<16}{'kind':<12}{'counted':>10}{'measured':>10}{'difference':>12}"
        rows = [
            f"{rank.rank:>4}  {item.name:<16}{item.kind:<12}{_mib(item.counted):>10}{_mib(item.measured):>10}"
            f"{_mib(item.difference, '+'):>12}"
            for rank in self.ranks
            for item in rank.items
        ]
        told = [f"Not measurable on this backend: {', '.join(self.unmeasured)}."] if self.unmeasured else []
        if self._kv_uncounted:
            told.append("KV is not counted: the device chose the budget of weights and KV itself (memory_per_rank 0).")
        return "\n".join([f"{self.label}, MiB", head, *rows, *told])

    def _repr_html_(self) -> str:
        import html

        return f"<pre>{html.escape(repr(self))}</pre>"


def memory_account(summary: Mapping[str, Any]) -> MemoryAccount:
    """From a run's summary. Without ranks for a foreign server."""
    label = str(summary.get("layout") or "foreign server")
    return MemoryAccount(label, [_rank(row, summary) for row in summary.get("memory_bytes") or []])


def pool_of(summary: Mapping[str, Any], rank: int) -> Pool:
    return next(pool for pool in pools_of(read_layout(summary["layout"])) if rank in pool.ranks)


def held(summary: Mapping[str, Any], rank: int, kv_bytes: int | None = None) -> dict[str, Holding]:
    """Part → what the layout gives the rank of it; empty for a model that is not known here."""
    try:
        spec = load_spec(summary["model"])
    except FileNotFoundError:
        return {}
    dtype = (summary.get("environment") or {}).get("dtype", spec.dtype)
    found = holdings(read_layout(summary["layout"]), spec, rank, DTYPE_BYTES[dtype], kv_bytes)
    return {holding.part: holding for holding in found}


def _rank(row: Mapping[str, Any], summary: Mapping[str, Any]) -> RankMemory:
    rank = row["rank"]
    counted = held(summary, rank, row["kv"])
    measured = dict(row.get("weights_by_part") or {})
    if not measured:
        measured = {"weights": row["weights"]}
    names = [*measured, *(part for part in counted if part not in measured and part != KV)]
    items = [_weights(name, counted, measured, row) for name in names]
    kind = _kind(counted[KV]) if KV in counted else ""
    items.append(Item(KV, kind, _counted_kv(summary, rank), row["kv"]))
    beside = row.get("beside") or {}
    guess = {"activations": _counted_activations(summary, rank)}
    items += [Item(name, "", guess.get(name), beside.get(name)) for name in BESIDE]
    return RankMemory(rank, [*items, Item("free", "", None, row["free"])])


def _weights(name: str, counted: Mapping[str, Holding], measured: Mapping[str, int], row: Mapping[str, Any]) -> Item:
    """A tied head that a rank keeps packed beside the embedding is counted once and measured twice: that shows."""
    holding = counted.get(name) or (counted.get("embedding") if name == "head" else None)
    count = counted[name].bytes if name in counted else 0 if counted else None
    return Item(name, _kind(holding) if holding else "", count, measured.get(name, 0))


def _kind(holding: Holding) -> str:
    if holding.copies > 1:
        return "replicated"
    return "split" if holding.of > 1 else "whole"


def _setting(summary: Mapping[str, Any], name: str) -> int:
    return int((summary.get("settings") or {}).get(name) or 0)


def _spec_of(summary: Mapping[str, Any]) -> tuple[ModelSpec, int] | None:
    try:
        spec = load_spec(summary["model"])
    except FileNotFoundError:
        return None
    return spec, DTYPE_BYTES[(summary.get("environment") or {}).get("dtype", spec.dtype)]


def _counted_kv(summary: Mapping[str, Any], rank: int) -> int | None:
    """Blocks beside the weights that fit the budget of the replica's fullest rank, at most what full steps at the
    end of the context need, and one to spare. None where the budget was the device's own choice and decides.
    """
    model, size = _spec_of(summary), _setting(summary, "block_size")
    if model is None or not size:
        return None
    (spec, dtype), pool = model, pool_of(summary, rank)
    local = rank - pool.first_rank
    peers = pool.layout.replica_ranks(pool.layout.replica_of(local))
    most = _setting(summary, "max_num_seqs") * -(-spec.max_positions // block_tokens(pool.layout, size))
    budget, weights = _setting(summary, "memory_per_rank"), _weights_by_rank(summary)
    if not budget:
        return None
    fits = min(
        (budget - weights[pool.first_rank + peer]) // _block_bytes(pool.layout, spec, peer, size, dtype) - 1
        for peer in peers
    )
    return (min(fits, most) + 1) * _block_bytes(pool.layout, spec, local, size, dtype)


def _weights_by_rank(summary: Mapping[str, Any]) -> dict[int, int]:
    return {row["rank"]: row["weights"] for row in summary["memory_bytes"]}


def _block_bytes(layout: Layout, spec: ModelSpec, rank: int, size: int, dtype: int) -> int:
    whole = kv_bytes_per_token(layout, spec, rank, dtype) * layout.dcp
    return stored_block(layout, size) * whole


def _counted_activations(summary: Mapping[str, Any], rank: int) -> int | None:
    """An estimate of a full step's peak: residual and normed rows beside the widest of queries, keys and values with
    their output, and the MLP's gate, up and product; or the logits of every sequence, if those are more.
    """
    model, tokens = _spec_of(summary), _setting(summary, "max_num_batched_tokens")
    if model is None or not tokens:
        return None
    (spec, dtype), layout = model, pool_of(summary, rank).layout
    attention = (2 * spec.num_heads + 2 * max(spec.num_kv_heads, layout.tp)) * spec.head_dim // layout.tp
    wide = [attention, 3 * spec.intermediate_size // layout.tp]
    if spec.moe:
        wide.append(3 * spec.moe.top_k * spec.moe.intermediate_size // layout.tp)
    rows = -(-tokens // layout.pcp) * (2 * spec.hidden_size + max(wide)) * dtype
    return max(rows, min(tokens, _setting(summary, "max_num_seqs")) * spec.vocab_size * LOGIT_BYTES)


# ---- two layouts


@dataclass(frozen=True)
class Change:
    """Of one part, on each layout's fullest rank. `ratio`: None where one of them is unknown or nothing."""

    name: str
    kind: str
    """Under the second layout."""
    before: int | None
    after: int | None

    @property
    def ratio(self) -> float | None:
        return self.after / self.before if self.before and self.after is not None else None


def part_by_part(one: MemoryAccount, other: MemoryAccount) -> list[Change]:
    """What a change of layout does to each part of a rank: TP2 does not halve everything. What is free is left out."""
    names = dict.fromkeys(
        item.name for account in (one, other) for rank in account.ranks for item in rank.items if item.name != "free"
    )
    return [Change(name, _kind_in(other, name), one.largest(name), other.largest(name)) for name in names]


def _kind_in(account: MemoryAccount, name: str) -> str:
    return next((item.kind for rank in account.ranks if (item := rank.of(name))), "")


def _mib(num_bytes: int | None, sign: str = "") -> str:
    return "–" if num_bytes is None else f"{num_bytes / 2**20:{sign},.2f}"
