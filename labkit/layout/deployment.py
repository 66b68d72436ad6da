"""A deployment is one layout, or pools with roles on disjoint ranks: `prefill:tp2,decode:tp1`.

The pools take ranks in the order in which they are written. The same string stands in the shell, in JSON and
on the page; a single pool that serves everything is written as its layout alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from labkit.layout.grammar import LayoutError
from labkit.layout.grid import Layout
from labkit.layout.legality import Legality, check_layout
from labkit.model.shapes import ModelSpec

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
