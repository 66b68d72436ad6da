"""Which rank holds which experts: in plain order, or spread by a load that was measured.

A router does not ask every expert equally often, and the busiest rank is the one that all others wait for.
`place_experts` gives the most loaded experts extra copies where some are allowed, then hands out all of them,
heaviest first, each to the least loaded rank that has room (longest processing time first, Graham 1969), and
trades experts away from the busiest rank as long as that helps. The tokens of an expert with several copies are
shared out evenly over them. Pure arithmetic over integers; the ranks are told the outcome.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.layout.grammar import LayoutError
from labkit.layout.ownership import part_of

Placement = tuple[tuple[int, ...], ...]
"""For each rank of an ep group, the experts that it holds, ascending."""
LayerPlacements = tuple[Placement, ...]
"""For each layer of the model its placement; () for a layer that keeps the plain one (or has no experts)."""


def plain_placement(num_experts: int, num_ranks: int) -> Placement:
    """Contiguous shares that differ by at most one expert."""
    return tuple(tuple(part_of(num_experts, num_ranks, rank)) for rank in range(num_ranks))


def place_experts(load: Sequence[float], num_ranks: int, num_copies: int = 0) -> Placement:
    """Experts on ranks so that the busiest rank has as little as can be had greedily.

    load: what each expert was asked to do (tokens), by expert; num_copies: extra copies, beyond one of each,
    to give to the most loaded; a rank never holds two copies of one expert. Slots are shared out evenly
    (they may differ by one). Raises ValueError when there are fewer slots than ranks or no room for copies.
    """
    num_experts = len(load)
    _check(load, num_ranks, num_copies)
    copies = _copies(load, num_ranks, num_copies)
    room = [len(part_of(num_experts + num_copies, num_ranks, rank)) for rank in range(num_ranks)]
    held: list[set[int]] = [set() for _ in range(num_ranks)]
    share = [tokens / number for tokens, number in zip(load, copies, strict=True)]
    for expert in sorted(range(num_experts), key=lambda e: (-share[e], -copies[e], e)):
        for _ in range(copies[expert]):
            held[_rank_for(expert, share, room, held)].add(expert)
    while _trade(held, share):
        pass
    return tuple(tuple(sorted(experts)) for experts in held)


def _check(load: Sequence[float], num_ranks: int, num_copies: int) -> None:
    num_experts = len(load)
    if not 1 <= num_ranks <= num_experts + num_copies:
        raise ValueError(
            f"{num_experts} experts and {num_copies} copies cannot be shared out over {num_ranks} ranks; "
            f"each rank needs one: take 1 to {num_experts + num_copies} ranks."
        )
    if not 0 <= num_copies <= num_experts * (num_ranks - 1):
        raise ValueError(
            f"{num_copies} extra copies of {num_experts} experts on {num_ranks} ranks: a rank holds an expert "
            f"once, so there is room for 0 to {num_experts * (num_ranks - 1)}."
        )
    if any(tokens < 0 for tokens in load):
        raise ValueError("an expert's load is its number of tokens and cannot be negative.")


def _copies(load: Sequence[float], num_ranks: int, num_copies: int) -> list[int]:
    """How many copies of each expert: every extra one goes to whose copies now carry the most."""
    copies = [1] * len(load)
    for _ in range(num_copies):
        open_to = [e for e in range(len(load)) if copies[e] < num_ranks]
        copies[max(open_to, key=lambda e: (load[e] / copies[e], -copies[e], -e))] += 1
    return copies


def _rank_for(expert: int, share: list[float], room: list[int], held: list[set[int]]) -> int:
    """The least loaded rank that has room and no copy yet; if only ranks with a copy have room, by a swap."""
    free = [rank for rank in range(len(held)) if len(held[rank]) < room[rank] and expert not in held[rank]]
    if not free:
        return _swap(expert, room, held)
    return min(free, key=lambda rank: (sum(share[e] for e in held[rank]), len(held[rank]), rank))


def _swap(expert: int, room: list[int], held: list[set[int]]) -> int:
    """Every rank with room holds this expert: one of them takes over another's expert, which makes room there."""
    for full in range(len(held)):
        for open_rank in range(len(held)):
            if expert in held[full] or len(held[open_rank]) >= room[open_rank]:
                continue
            movable = held[full] - held[open_rank]
            if movable:
                moved = max(movable)
                held[full].remove(moved)
                held[open_rank].add(moved)
                return full
    raise ValueError(f"there is no rank left for a copy of expert {expert}; ask for fewer copies.")


def _trade(held: list[set[int]], share: list[float]) -> bool:
    """The one exchange of two experts that helps the busiest rank most; False when none does."""
    loads = [sum(share[e] for e in experts) for experts in held]
    busiest = max(range(len(held)), key=loads.__getitem__)
    best, traded = loads[busiest] * (1 - 1e-9), None
    for rank in range(len(held)):
        for given in held[busiest] - held[rank]:
            for taken in held[rank] - held[busiest]:
                moved = share[given] - share[taken]
                worse = max(loads[busiest] - moved, loads[rank] + moved)
                if worse < best:
                    best, traded = worse, (rank, given, taken)
    if traded is None:
        return False
    rank, given, taken = traded
    held[busiest] = held[busiest] - {given} | {taken}
    held[rank] = held[rank] - {taken} | {given}
    return True


def rank_loads(placement: Placement, load: Sequence[float]) -> list[float]:
    """Tokens that each rank has to compute when the copies of an expert share its tokens evenly."""
    copies = [sum(expert in held for held in placement) for expert in range(len(load))]
    return [sum(load[expert] / copies[expert] for expert in held) for held in placement]


def imbalance(placement: Placement, load: Sequence[float]) -> float:
    """The busiest rank's tokens over the mean rank's: 1 is even. 1.0 too where there is no load."""
    loads = rank_loads(placement, load)
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def check_placement(placement: Placement, num_experts: int, num_ranks: int) -> None:
    """Raises LayoutError, by the expert's number, unless every expert has a rank and no rank an unknown one."""
    if len(placement) != num_ranks:
        raise LayoutError(f"a placement for {len(placement)} ranks does not fit an ep group of {num_ranks}.")
    held = {expert for experts in placement for expert in experts}
    missing = sorted(set(range(num_experts)) - held)
    unknown = sorted(held - set(range(num_experts)))
    if missing:
        raise LayoutError(f"no rank owns expert {missing[0]}: give each of 0 to {num_experts - 1} a rank.")
    if unknown:
        raise LayoutError(f"expert {unknown[0]} is placed, and the model has 0 to {num_experts - 1}.")
