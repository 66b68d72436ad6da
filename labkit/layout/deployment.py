"""A deployment is one layout, or pools with roles on disjoint ranks: `prefill:tp2,decode:tp1`.

The pools take ranks in the order in which they are written. The same string stands in the shell, in JSON and
on the page; a single pool that serves everything is written as its layout alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from labkit.layout.grammar import LayoutError
from labkit.layout.grid import Layout
from labkit.layout.legality import Legality, check_layout, require_legal
from labkit.model.shapes import ModelSpec

AnyLayout: TypeAlias = "Layout | Deployment"
"""What ranks are set up as: one layout, or pools of them."""
ROLES = ("any", "prefill", "decode", "long")
"""any: whole requests; prefill and decode: one phase each, with a handoff of KV; long: requests with long
prompts.
"""


class Pool(NamedTuple):
    """A layout with a role, on ranks first_rank .. first_rank + world_size − 1."""

    role: str
    layout: Layout
    first_rank: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.layout.world_size)

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The global ranks of each replica."""
        layout = self.layout
        return tuple(self.globally(layout.replica_ranks(replica)) for replica in range(layout.dp))

    def globally(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Ranks of the pool's layout as ranks of the whole world."""
        return tuple(self.first_rank + rank for rank in ranks)

    def __str__(self) -> str:
        return f"{self.role}:{self.layout}"


@dataclass(frozen=True)
class Deployment:
    """Pools on disjoint ranks. Make one with `Deployment.parse` or `Deployment.of`."""

    pools: tuple[Pool, ...]

    @classmethod
    def of(cls, *roles: tuple[str, Layout]) -> Deployment:
        """Pools from (role, layout) pairs, ranks given out in order. Raises LayoutError."""
        _check_roles([role for role, _ in roles])
        pools, first = [], 0
        for role, layout in roles:
            pools.append(Pool(role, layout, first))
            first += layout.world_size
        return cls(tuple(pools))

    @classmethod
    def parse(cls, text: str) -> Deployment:
        """Read `prefill:tp2,decode:tp1`, or a bare layout. Raises LayoutError."""
        return cls.of(*(_parse_pool(word, text) for word in text.split(",")))

    @property
    def world_size(self) -> int:
        return sum(pool.layout.world_size for pool in self.pools)

    @property
    def slug(self) -> str:
        if self._is_plain:
            return self.pools[0].layout.slug
        return ",".join(f"{pool.role}:{pool.layout.slug}" for pool in self.pools)

    def __str__(self) -> str:
        return str(self.pools[0].layout) if self._is_plain else ", ".join(map(str, self.pools))

    @property
    def _is_plain(self) -> bool:
        return len(self.pools) == 1 and self.pools[0].role == "any"

    @property
    def hands_off(self) -> bool:
        """Whether requests are prefilled in one pool and decoded in another."""
        return any(pool.role == "prefill" for pool in self.pools)

    @property
    def attention_dp(self) -> bool:
        return any(pool.layout.attention_dp for pool in self.pools)

    @property
    def handoff_ranks(self) -> tuple[int, ...]:
        """All ranks that give or take KV; none where every pool serves whole requests."""
        taking_part = [pool for pool in self.pools if pool.role in ("prefill", "decode")]
        return tuple(rank for pool in taking_part for rank in pool.ranks)

    def pool_of(self, rank: int) -> Pool:
        """The pool that holds a global rank. Raises LayoutError when none does."""
        for pool in self.pools:
            if rank in pool.ranks:
                return pool
        raise LayoutError(f"{self} has ranks 0 to {self.world_size - 1}; there is no rank {rank}.")

    def serving(self, phase: str) -> tuple[Pool, ...]:
        """The pools that take a request's `phase` (prefill or decode)."""
        return tuple(pool for pool in self.pools if pool.role in (phase, "any", "long"))


def _parse_pool(word: str, text: str) -> tuple[str, Layout]:
    role, colon, layout = word.strip().partition(":")
    if not colon:
        if "," in text:
            raise LayoutError(
                f"{word.strip()!r} in {text!r} has no role; several pools need one each, as any:tp2."
            )
        return "any", Layout.parse(role)
    return role.strip().lower(), Layout.parse(layout)


def _check_roles(roles: list[str]) -> None:
    for role in roles:
        if role not in ROLES:
            raise LayoutError(f"{role!r} is no role; the roles are {', '.join(ROLES)}.")
        if roles.count(role) > 1:
            raise LayoutError(f"The role {role} stands twice; give one pool more replicas with dp instead.")
    for one, other in (("prefill", "decode"), ("decode", "prefill")):
        if one in roles and other not in roles:
            raise LayoutError(f"A {one} pool needs a {other} pool beside it, and there is none.")
    if roles == ["long"]:
        raise LayoutError(
            "A pool for long prompts needs one for the others; add any:…, or write the layout alone."
        )


def read_layout(text: str) -> AnyLayout:
    """What a layout string says: a Layout, or a Deployment where it names roles. Raises LayoutError."""
    deployment = Deployment.parse(text)
    return deployment.pools[0].layout if deployment._is_plain else deployment


def pools_of(layout: AnyLayout) -> tuple[Pool, ...]:
    """Its pools; a layout alone is one that takes everything."""
    return layout.pools if isinstance(layout, Deployment) else (Pool("any", layout, 0),)


def require_deployable(
    layout: AnyLayout, spec: ModelSpec, num_ranks: int | None = None, *, engine: bool = False
) -> None:
    """Raise LayoutError (a ValueError) with a sentence when the layout, or one of the pools, is not allowed."""
    if isinstance(layout, Layout):
        require_legal(layout, spec, num_ranks, engine=engine)
        return
    if num_ranks is not None and layout.world_size > num_ranks:
        sizes = " + ".join(str(pool.layout.world_size) for pool in layout.pools)
        verb = "is" if num_ranks == 1 else "are"
        raise LayoutError(f"{layout} needs {sizes} = {layout.world_size} ranks, and {num_ranks} {verb} there.")
    for pool, answer in check_deployment(layout, spec, num_ranks, engine=engine):
        if not answer:
            raise LayoutError(f"The {pool.role} pool: {answer}")


def check_deployment(
    deployment: Deployment, spec: ModelSpec, num_ranks: int | None = None, *, engine: bool = False
) -> list[tuple[Pool, Legality]]:
    """Every pool's legality; with `num_ranks`, each pool is given what the others leave."""
    spare = None if num_ranks is None else num_ranks - deployment.world_size
    return [
        (pool, check_layout(pool.layout, spec, _share(pool, spare), engine=engine))
        for pool in deployment.pools
    ]


def _share(pool: Pool, spare: int | None) -> int | None:
    return None if spare is None else max(0, pool.layout.world_size + spare)
