"""How many requests take a KV block at which tick: each takes one every `block_size` ticks, at the same remainder."""

from __future__ import annotations


class Takers:
    """Counts by tick % size. A request of `slot` takes a block at every tick that leaves `slot` over."""

    __slots__ = ("counts", "_size", "total")

    def __init__(self, size: int) -> None:
        self.counts, self._size, self.total = [0] * size, size, 0
        """By what a tick leaves over: who takes a block then."""

    def add(self, slot: int) -> None:
        self.counts[slot] += 1
        self.total += 1

    def remove(self, slot: int) -> None:
        self.counts[slot] -= 1
        self.total -= 1

    def taken(self, tick: int, num_steps: int) -> int:
        """Blocks taken in `num_steps` steps from `tick` on."""
        counts, size = self.counts, self._size
        at = tick % size
        if num_steps == 1:
            return counts[at]
        rounds, rest = divmod(num_steps, size)
        end = at + rest
        part = sum(counts[at:end]) if end <= size else sum(counts[at:]) + sum(counts[: end - size])
        return rounds * self.total + part

    def steps(self, tick: int, num_steps: int, free: int) -> int:
        """How many of `num_steps` steps find their blocks among `free`."""
        size, total = self._size, self.total
        if not total:
            return num_steps
        rounds = min(num_steps // size, max(0, free // total - 1))
        free -= rounds * total
        done = rounds * size
        while done < num_steps and (free := free - self.counts[(tick + done) % size]) >= 0:
            done += 1
        return done
