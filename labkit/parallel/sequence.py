"""Sequence parallelism: between two tensor-parallel products a rank may hold its share of the rows instead of all.

An all-reduce is a reduce-scatter and an all-gather. Where a layer adds up its ranks' partial sums, the first half is
enough for what follows, for norms and residuals look at one row at a time; the second half comes when the next
product needs every row. The bytes are the same, the rows between are not repeated on every rank (Korthikanti et al.
2022). Rows are shared out in order, evenly, the last ranks' padded with zeros; where there are none, nothing is said.
Shapes: R rows of the step, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from labkit.parallel.comm import Group


class ResidualStream:
    """The hidden states between layers, as one rank of a tensor-parallel group holds them.

    shares: each rank holds ceil(R / size) rows (`+sp`); otherwise all ranks hold all R.
    """

    __slots__ = ("group", "num_rows", "shares")

    def __init__(self, group: Group, shares: bool = False) -> None:
        self.group, self.shares = group, shares and group.size > 1
        self.num_rows = 0

    def begin(self, num_rows: int) -> None:
        """A step of so many rows follows."""
        self.num_rows = num_rows

    def held(self, num_rows: int) -> int:
        """How many of a step's rows a rank holds, padding included."""
        return -(-num_rows // self.group.size) if self.shares else num_rows

    def summed(self, partial: Tensor) -> Tensor:
        """partial [R, H], this rank's term → what it holds of the sum over the ranks."""
        if not self.shares:
            return self.group.all_reduce(partial)
        if not len(partial):
            return partial
        return self.group.reduce_scatter(_padded(partial, self.held(len(partial)) * self.group.size))

    def whole(self, held: Tensor) -> Tensor:
        """What the ranks hold → all rows [R, H] on each."""
        return self.group.all_gather(held)[: self.num_rows] if self.shares and self.num_rows else held

    def share(self, held: Tensor) -> Tensor:
        """Of what this rank holds, the rows that are its share, without padding: it alone sends them to experts."""
        if self.group.size == 1:
            return held
        each = -(-self.num_rows // self.group.size)
        first = self.group.rank * each
        num_own = max(0, min(each, self.num_rows - first))
        return held[:num_own] if self.shares else held[first : first + num_own]

    @property
    def first_of_share(self) -> int:
        """Which of the step's rows this rank's share begins with."""
        return self.group.rank * -(-self.num_rows // self.group.size)

    def rejoined(self, own: Tensor) -> Tensor:
        """What became of each rank's `share` → rows as they are held."""
        if self.group.size == 1:
            return own
        padded = _padded(own, -(-self.num_rows // self.group.size))
        return padded if self.shares else self.group.all_gather(padded)[: self.num_rows]


def _padded(rows: Tensor, count: int) -> Tensor:
    """`rows`, then zeros up to `count`."""
    return rows if len(rows) == count else F.pad(rows, (0, 0, 0, count - len(rows)))
