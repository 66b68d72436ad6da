"""Sets of intervals on one clock: unions, what two of them share, and what neither covers."""

from __future__ import annotations

from collections.abc import Iterable

Intervals = list[tuple[float, float]]
"""Begin and end of each, in order, apart from each other."""


def union(spans: Iterable[tuple[float, float]]) -> Intervals:
    """Overlapping and touching spans become one; empty ones go."""
    merged: Intervals = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def common(one: Intervals, other: Intervals) -> Intervals:
    """Where both are."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(one: Intervals, other: Intervals) -> Intervals:
    """Where `one` is and `other` is not."""
    left: Intervals = []
    for begin, end in one:
        for start, stop in common([(begin, end)], other):
            if start > begin:
                left.append((begin, start))
            begin = stop
        if begin < end:
            left.append((begin, end))
    return left


def total(spans: Intervals) -> float:
    return sum(end - begin for begin, end in spans)
