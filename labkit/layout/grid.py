"""A layout is a value: degrees that arrange ranks in a grid, and every group of ranks is a slice of that
grid.

Rank order, innermost first: tp, pcp, pp, dp, so that the most frequent traffic is between neighbours. Two
axes reuse ranks that are there already: dcp shares out the positions of KV copies, ep shares out experts.
Groups list global ranks in ascending order; for every axis they are disjoint and cover the world.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from labkit.layout.grammar import AXES, MAX_DEGREE, LayoutError, format_fields, parse_fields

GRID_AXES = ("dp", "pp", "pcp", "tp")
"""The axes that multiply to the world size, outermost first."""
GROUP_AXES = (*AXES, "world")


class Coords(NamedTuple):
    """Where a rank stands in the grid."""

    dp: int
    pp: int
    pcp: int
    tp: int


Groups = tuple[tuple[int, ...], ...]


def dcp_allowed(dcp: int, *, tp: int, pcp: int, num_kv_heads: int) -> bool:
    """Whether `dcp` ranks can share out positions: only where copies of the same KV head exist.

    Without pcp, a KV head has max(1, tp ÷ kv_heads) copies and dcp must divide that. With pcp, the copies
    over pcp are shared out first, so dcp is 1, pcp or tp · pcp, at most pcp · max(1, tp ÷ kv_heads). MLA
    counts as one KV head.
    """
    copies = max(1, tp // num_kv_heads)
    if pcp == 1:
        return copies % dcp == 0
    return dcp in (1, pcp, tp * pcp) and dcp <= pcp * copies


def dcp_degrees(*, tp: int, pcp: int, num_kv_heads: int) -> tuple[int, ...]:
    """Every dcp that `dcp_allowed` allows, ascending."""
    candidates = range(1, tp + 1) if pcp == 1 else sorted({1, pcp, tp * pcp})
    return tuple(d for d in candidates if dcp_allowed(d, tp=tp, pcp=pcp, num_kv_heads=num_kv_heads))


def ep_degrees(*, dp: int, pcp: int, tp: int) -> tuple[int, ...]:
    """1 (every rank holds its cut of all experts), tp·pcp (inside a replica), dp·tp·pcp (attention-DP),
    ascending.
    """
    return tuple(sorted({1, tp * pcp, dp * tp * pcp}))


def _degree_problems(layout: Layout) -> list[str]:
    problems = []
    for axis in AXES:
        degree = getattr(layout, axis)
        if isinstance(degree, bool) or not isinstance(degree, int) or not 1 <= degree <= MAX_DEGREE:
            problems.append(f"{axis} is {degree!r}; a degree is a whole number from 1 to {MAX_DEGREE}.")
    return problems


def _listed(degrees: tuple[int, ...]) -> str:
    return ", ".join(map(str, degrees))


def _reuse_problems(layout: Layout) -> list[str]:
    problems = []
    if not dcp_allowed(layout.dcp, tp=layout.tp, pcp=layout.pcp, num_kv_heads=1):
        allowed = dcp_degrees(tp=layout.tp, pcp=layout.pcp, num_kv_heads=1)
        problems.append(
            f"dcp {layout.dcp} does not fit tp {layout.tp} × pcp {layout.pcp}: dcp reuses their ranks "
            f"and may be {_listed(allowed)} (or less, by the model's KV heads)."
        )
    allowed = ep_degrees(dp=layout.dp, pcp=layout.pcp, tp=layout.tp)
    if layout.ep not in allowed:
        problems.append(
            f"ep {layout.ep} does not fit dp {layout.dp} × pcp {layout.pcp} × tp {layout.tp}: ep is tp·pcp "
            f"inside a replica or dp·tp·pcp over all of them, so it may be {_listed(allowed)}."
        )
    return problems


def _option_problems(layout: Layout) -> list[str]:
    problems = []
    if layout.sp and layout.tp == 1:
        problems.append("+sp shares out norms over tp ranks, and tp is 1; leave it out or raise tp.")
    if layout.ring and layout.pcp == 1:
        problems.append("+ring passes KV around the pcp ranks, and pcp is 1; leave it out or raise pcp.")
    if layout.split is not None:
        if len(layout.split) != layout.pp:
            problems.append(
                f"+split={'-'.join(map(str, layout.split))} names {len(layout.split)} stages and pp is "
                f"{layout.pp}; give one number of layers for each stage."
            )
        if layout.pp == 1:
            problems.append("+split divides layers between pp stages, and pp is 1; leave it out or raise pp.")
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in layout.split):
            problems.append("+split: every stage needs at least 1 layer.")
    return problems


@dataclass(frozen=True)
class Layout:
    """How ranks are arranged: replicas (dp) × stages (pp) × prefill positions (pcp) × shards of every layer
    (tp).

    dcp: how many ranks share out the KV positions of a sequence. ep: how many ranks share out the experts;
    tp·pcp keeps that inside a replica's stage, dp·tp·pcp makes it attention-DP. Options: sp
    (sequence-parallel norms), ring (pcp passes KV around instead of gathering it), split (layers of each
    stage). Raises LayoutError (a ValueError) when the degrees do not fit each other; whether a model allows
    the layout is asked of `check_layout`.
    """

    dp: int = 1
    pp: int = 1
    pcp: int = 1
    tp: int = 1
    dcp: int = 1
    ep: int = 1
    sp: bool = False
    ring: bool = False
    split: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.split is not None:
            object.__setattr__(self, "split", tuple(self.split))
        problems = _degree_problems(self) or _reuse_problems(self) + _option_problems(self)
        if problems:
            raise LayoutError(" ".join(problems))

    # ---- written form

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read `dp2xtp2+sp` (any case, x or ×). Raises LayoutError."""
        return cls(**parse_fields(text))  # type: ignore[arg-type]  # the grammar gives each field its own type

    def __str__(self) -> str:
        return format_fields(self, pretty=True)

    @property
    def slug(self) -> str:
        return format_fields(self, pretty=False)

    # ---- sizes

    @property
    def world_size(self) -> int:
        return self.dp * self.ranks_per_replica

    @property
    def ranks_per_replica(self) -> int:
        return self.pp * self.ranks_per_stage

    @property
    def ranks_per_stage(self) -> int:
        """Ranks of one replica that hold the same layers: tp · pcp."""
        return self.pcp * self.tp

    @property
    def attention_dp(self) -> bool:
        """Whether the experts are shared out over all replicas, so that replicas step together."""
        return self.dp > 1 and self.ep == self.dp * self.ranks_per_stage

    # ---- ranks

    def coords(self, rank: int) -> Coords:
        """Grid coordinates of a global rank. Raises LayoutError outside 0..world_size−1."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"{self} has ranks 0 to {self.world_size - 1}; there is no rank {rank}.")
        rest, tp = divmod(rank, self.tp)
        rest, pcp = divmod(rest, self.pcp)
        dp, pp = divmod(rest, self.pp)
        return Coords(dp, pp, pcp, tp)

    def rank_of(self, coords: Coords) -> int:
        """The global rank at grid coordinates (the inverse of `coords`)."""
        for axis, at in zip(GRID_AXES, coords, strict=True):
            if not 0 <= at < getattr(self, axis):
                raise LayoutError(
                    f"{self} has {axis} 0 to {getattr(self, axis) - 1}; there is no {axis} {at}."
                )
        dp, pp, pcp, tp = coords
        return ((dp * self.pp + pp) * self.pcp + pcp) * self.tp + tp

    def replica_of(self, rank: int) -> int:
        return self.coords(rank).dp

    def replica_ranks(self, replica: int) -> tuple[int, ...]:
        first = self.rank_of(Coords(replica, 0, 0, 0))
        return tuple(range(first, first + self.ranks_per_replica))

    def sampling_rank(self, replica: int) -> int:
        """The rank that gathers logits and samples: the last stage's first tp rank."""
        return self.rank_of(Coords(replica, self.pp - 1, 0, 0))

    # ---- groups

    def groups(self, axis: str) -> Groups:
        """All groups of an axis (tp, pcp, pp, dp, dcp, ep or world), ordered by their first rank."""
        return _groups(self, axis)

    def group_of(self, axis: str, rank: int) -> tuple[int, ...]:
        """The group of an axis that holds `rank`."""
        self.coords(rank)
        return _group_by_rank(self, axis)[rank]

    def index_in(self, axis: str, rank: int) -> int:
        """Where `rank` stands in its group of an axis."""
        return self.group_of(axis, rank).index(rank)


def _key(layout: Layout, axis: str, rank: int) -> tuple[int, ...]:
    """What two ranks have in common exactly when they are in one group of `axis`."""
    at = layout.coords(rank)
    if axis == "world":
        return ()
    if axis == "ep":
        if layout.ep == 1:
            return (rank,)
        return (at.pp,) if layout.attention_dp else (at.dp, at.pp)
    if axis == "dcp":
        return _dcp_key(layout, at)
    return tuple(c for name, c in zip(GRID_AXES, at, strict=True) if name != axis)


def _dcp_key(layout: Layout, at: Coords) -> tuple[int, ...]:
    if layout.pcp == 1:  # neighbours in tp hold copies of one KV head
        return (at.dp, at.pp, at.tp // layout.dcp)
    if layout.dcp == 1:
        return at
    return (at.dp, at.pp, at.tp) if layout.dcp == layout.pcp else (at.dp, at.pp)


@lru_cache(maxsize=512)
def _groups(layout: Layout, axis: str) -> Groups:
    if axis not in GROUP_AXES:
        raise LayoutError(f"{axis!r} is no axis; the axes are {', '.join(GROUP_AXES)}.")
    members: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        members.setdefault(_key(layout, axis, rank), []).append(rank)
    return tuple(tuple(group) for group in members.values())


@lru_cache(maxsize=512)
def _group_by_rank(layout: Layout, axis: str) -> dict[int, tuple[int, ...]]:
    return {rank: group for group in _groups(layout, axis) for rank in group}
