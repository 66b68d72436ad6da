"""What a fabric must be able to do, so that groups need not know which one carries them.

A `Fabric` joins ranks under a name and gives each of them its end of a `Wire`. A wire moves tensors between
its members and records nothing; every one of its calls is made by all members in the same order. When a
member is gone, the others' calls raise `PeerLost`, which says that somebody else went first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class PeerLost(RuntimeError):
    """Another rank went away, or did not come to a call in time: this rank is not the one to blame.

    `rank` is the global rank that is missing, or -1 when the fabric cannot tell.
    """

    def __init__(self, rank: int, sentence: str) -> None:
        self.rank = rank
        super().__init__(f"rank {rank}: {sentence}" if rank >= 0 else sentence)


class Pending(Protocol):
    """A send or a receive under way."""

    def wait(self) -> None: ...

    def advance(self) -> bool:
        """Move it along without waiting; True when it goes on by itself from here, or is over."""
        ...


class Wire(ABC):
    """One group's members joined over one fabric. It moves tensors and records nothing."""

    def __init__(self, ranks: tuple[int, ...], rank: int) -> None:
        self.ranks = ranks
        self.rank = rank
        self.size = len(ranks)

    @abstractmethod
    def all_reduce(self, x: Tensor) -> None:
        """Sum over the ranks, in place."""

    @abstractmethod
    def all_gather(self, x: Tensor, dim: int) -> Tensor: ...

    @abstractmethod
    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor: ...

    @abstractmethod
    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]: ...

    @abstractmethod
    def broadcast(self, x: Tensor, src: int) -> None: ...

    @abstractmethod
    def gather(self, x: Tensor) -> list[Tensor] | None: ...

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def isend(self, x: Tensor, dst: int) -> Pending: ...

    @abstractmethod
    def irecv(self, x: Tensor, src: int) -> Pending: ...

    @abstractmethod
    def is_stale(self) -> bool:
        """A member has closed its end, so the wire must not be used again."""

    @abstractmethod
    def abort(self) -> None:
        """Tell the members that this rank will not come any more; their waiting calls raise PeerLost."""

    @abstractmethod
    def close(self) -> None: ...


class Fabric(ABC):
    """Makes wires. `name` is what `Configure.fabric` calls it."""

    name: str

    @abstractmethod
    def open(self, name: str, ranks: tuple[int, ...], rank: int) -> Wire:
        """Join the ranks under a name that they agree on and that was never used before; all of them call it.

        ranks: global ranks; rank: this one's place among them. Raises PeerLost when a member does not come.
        """

    def suit(self, num_busy_threads: int) -> None:
        """Told at each layout: how many threads, over all ranks, now share this host's cores."""
        return None

    def close(self) -> None:
        return None
