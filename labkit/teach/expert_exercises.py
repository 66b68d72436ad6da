"""The exercises of lesson 05: the bytes of an all-to-all from a routing table, and a placement that spreads a load."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.layout import check_placement, part_of, place_experts, rank_loads
from labkit.teach.checks import Check, Problem, show_check

Bytes = NDArray[np.int64]


def sent_bytes(
    source: Sequence[int], expert: Sequence[int], owner: Sequence[int], num_ranks: int, hidden: int, size: int
) -> Bytes:
    """The solution: int64 [num_ranks, num_ranks], bytes that rank a sends to rank b for one layer, both ways.

    source, expert: of each row (a token on its way to one expert) the rank that has the token, and the expert.
    """
    sent = np.zeros((num_ranks, num_ranks), np.int64)
    for here, asked in zip(source, expert, strict=True):
        there = owner[asked]
        if there != here:
            sent[here, there] += (hidden + 1) * size
            sent[there, here] += hidden * size
    return sent


_PLAIN = (0, 0, 0, 0, 1, 1, 1, 1)
_HALVES = (0,) * 8 + (1,) * 8
_SKEWED = (0, 1, 2, 3, 0, 1, 2, 4) * 2
"""Seven of eight rows go to the first rank's experts, from either rank."""


def check_sent_bytes(function: Callable[..., Any]) -> Check:
    """From rows that stay at home to a routing table of three ranks."""
    rng = np.random.default_rng(5)
    source, expert = rng.integers(0, 3, 40).tolist(), rng.integers(0, 8, 40).tolist()
    cases = (
        ((0, 1), (1, 6), _PLAIN, 2, 4, 4, "experts at home: nothing crosses"),
        ((0,), (5,), _PLAIN, 2, 4, 4, "one row to the neighbour: with its label there, without it back"),
        ((0, 0), (4, 5), _PLAIN, 2, 4, 4, "one token and two experts of one rank: it travels twice"),
        (_HALVES, _SKEWED, _PLAIN, 2, 256, 4, "seven of eight choices fall on rank 0"),
        ((1,) * 16, _SKEWED, _PLAIN, 2, 256, 2, "and all tokens are rank 1's, in half precision"),
        (source, expert, (0, 1, 2, 0, 1, 2, 0, 1), 3, 16, 4, "three ranks, experts dealt out in turn"),
    )
    return show_check(function, [_bytes_case(*case) for case in cases])


def _bytes_case(*case: Any) -> Problem:
    *args, why = case
    shown = f"{len(args[0])} rows, {args[3]} ranks, hidden {args[4]}"
    return Problem(tuple(args), sent_bytes(*args), why, shown)


def spread(load: Sequence[int], num_ranks: int) -> list[list[int]]:
    """The solution: the heaviest expert first, each to the least loaded rank that has room."""
    room = -(-len(load) // num_ranks)
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for expert in sorted(range(len(load)), key=lambda e: -load[e]):
        open_ranks = [mine for mine in ranks if len(mine) < room]
        min(open_ranks, key=lambda mine: sum(load[e] for e in mine)).append(expert)
    return ranks


SPREAD_CASES = (
    ((10, 10, 10, 10, 10, 10, 10, 10), 2, "an even load: anything even will do"),
    ((90, 80, 70, 60, 4, 3, 2, 1), 2, "the hot ones are neighbours, as in the run above"),
    ((90, 1, 2, 80, 3, 70, 4, 60), 4, "four ranks, one hot expert for each"),
    ((60, 9, 8, 7, 6, 5, 4, 3), 2, "one hot expert: the rest goes elsewhere, as far as there is room"),
    ((0, 0, 0, 0, 0, 50, 0, 0), 2, "one expert is all of it: nothing but a copy would help"),
)


def check_spread(function: Callable[..., Any]) -> Check:
    """What the busiest rank has to do, held against the engine's own placement."""
    cases = [
        Problem((load, num_ranks), max(rank_loads(place_experts(load, num_ranks), load)), why)
        for load, num_ranks, why in SPREAD_CASES
    ]
    return show_check(_judged(function), cases)


def _judged(function: Callable[..., Any]) -> Callable[..., float]:
    """The busiest rank's load of a placement; ValueError with a sentence for what is none."""

    @functools.wraps(function)
    def busiest(load: Sequence[int], num_ranks: int) -> float:
        placed = tuple(tuple(sorted(map(int, mine))) for mine in function(load, num_ranks))
        check_placement(placed, len(load), num_ranks)
        if sum(map(len, placed)) != len(load):
            raise ValueError("an expert stands twice: without copies each is on one rank.")
        room = len(part_of(len(load), num_ranks, 0))
        if max(map(len, placed)) > room:
            raise ValueError(f"a rank has {max(map(len, placed))} experts, and there is memory for {room}.")
        return max(rank_loads(placed, load))

    return busiest
