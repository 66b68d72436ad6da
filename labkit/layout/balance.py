"""Which layers each pipeline stage should hold, from what each part was measured to take.

The slowest stage sets the pace of all, so the best split is the one whose slowest stage is fastest. Layers are
alike, the ends are not: the first stage also embeds, the last also has the head, which over a large vocabulary
weighs as much as several layers. An equal number of layers is then the wrong split, and by how much is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from labkit.layout.grammar import LayoutError
from labkit.layout.ownership import part_of


@dataclass(frozen=True)
class PartCost:
    """What one part takes: seconds of a step, bytes of weights and KV for as long as it stands."""

    seconds: float
    num_bytes: int = 0

    def __add__(self, other: PartCost) -> PartCost:
        return PartCost(self.seconds + other.seconds, self.num_bytes + other.num_bytes)


@dataclass(frozen=True)
class ModelProfile:
    """The parts of one model as one rank measured them, and for which step."""

    embedding: PartCost
    layers: tuple[PartCost, ...]
    head: PartCost
    """The last norm, the output projection and the sampling."""
    measured: str = ""
    """Where and on what: model, machine, step."""

    def stages(self, split: Sequence[int]) -> tuple[PartCost, ...]:
        """What each stage takes when it holds so many layers. LayoutError when they do not add up."""
        if sum(split) != len(self.layers) or min(split) < 1:
            raise LayoutError(
                f"split {'-'.join(map(str, split))} does not divide {len(self.layers)} layers into stages of 1 or more."
            )
        ends = [sum(split[: at + 1]) for at in range(len(split))]
        return tuple(self._stretch(end - count, end) for end, count in zip(ends, split, strict=True))

    def _stretch(self, start: int, stop: int) -> PartCost:
        """Layers [start, stop), and the ends that come with the first and the last of them."""
        cost = sum(self.layers[start:stop], PartCost(0.0))
        if start == 0:
            cost += self.embedding
        return cost + self.head if stop == len(self.layers) else cost


@dataclass(frozen=True)
class Balance:
    """The measured split beside the equal one."""

    split: tuple[int, ...]
    stages: tuple[PartCost, ...]
    equal_split: tuple[int, ...]
    equal_stages: tuple[PartCost, ...]
    measured: str = ""
    """Where and on what: the profile's."""

    def figures(self) -> dict[str, Any]:
        """For a script: both splits with each stage's ms and bytes, and the gain."""
        both = {"measured": (self.split, self.stages), "equal": (self.equal_split, self.equal_stages)}
        rows = {
            name: {
                "split": list(split),
                "stage_ms": [1e3 * stage.seconds for stage in stages],
                "stage_bytes": [stage.num_bytes for stage in stages],
            }
            for name, (split, stages) in both.items()
        }
        return {**rows, "option": self.option, "gain": self.gain, "profile": self.measured}

    def table(self) -> str:
        """The same for a reader."""
        lines = [f"Measured on {self.measured}."]
        for name, row in self.figures().items():
            if isinstance(row, dict):
                times = "  ".join(f"{ms:.2f}" for ms in row["stage_ms"])
                lines.append(f"{name:9} {'-'.join(map(str, row['split'])):12} stages take {times} ms a step")
        lines.append(f"The pipeline's pace is {self.gain:.2f} times that of equal stages with {self.option}.")
        return "\n".join(lines)

    @property
    def slowest_s(self) -> float:
        return max(stage.seconds for stage in self.stages)

    @property
    def equal_slowest_s(self) -> float:
        return max(stage.seconds for stage in self.equal_stages)

    @property
    def slowest_stage(self) -> int:
        return [stage.seconds for stage in self.stages].index(self.slowest_s)

    @property
    def gain(self) -> float:
        """How much faster the pipeline's pace is than with equal stages: 1.2 is a fifth."""
        return self.equal_slowest_s / self.slowest_s

    @property
    def option(self) -> str:
        """As a layout has it: `+split=6-4`."""
        return f"+split={'-'.join(map(str, self.split))}"


def balance_stages(profile: ModelProfile, num_stages: int, memory_bytes: int | None = None) -> Balance:
    """The split whose slowest stage is fastest; of those, the one whose fullest stage has fewest bytes.

    memory_bytes: what a stage may hold. Raises LayoutError when there are more stages than layers, or when no
    split fits the memory.
    """
    num_layers = len(profile.layers)
    if not 1 <= num_stages <= num_layers:
        raise LayoutError(f"{num_layers} layers cannot fill {num_stages} stages; pp may be 1 to {num_layers}.")
    room = float("inf") if memory_bytes is None else memory_bytes
    fastest = _best(profile, num_stages, float("inf"), room)
    if fastest is None:
        least = _best(profile, num_stages, float("inf"), float("inf"), by_bytes=True)
        assert least is not None
        fullest = max(stage.num_bytes for stage in profile.stages(least))
        raise LayoutError(
            f"No split of {num_layers} layers into {num_stages} stages fits {memory_bytes} bytes a stage: the evenest "
            f"in memory ({'-'.join(map(str, least))}) puts {fullest} on one. Use more stages, or a larger budget."
        )
    pace = max(stage.seconds for stage in profile.stages(fastest))
    split = _best(profile, num_stages, pace, room, by_bytes=True) or fastest
    equal = tuple(len(part_of(num_layers, num_stages, stage)) for stage in range(num_stages))
    return Balance(split, profile.stages(split), equal, profile.stages(equal), profile.measured)


def _best(
    profile: ModelProfile, num_stages: int, most_s: float, most_bytes: float, *, by_bytes: bool = False
) -> tuple[int, ...] | None:
    """The split with the least maximum of seconds (or of bytes) among those whose stages keep to both limits.

    Dynamic programming over (where a stage begins, how many are left): layers² · stages small sums.
    """
    num_layers = len(profile.layers)

    @cache
    def rest(start: int, left: int) -> tuple[float, tuple[int, ...]] | None:
        """(maximum, split) of layers [start, …) over `left` stages; None when nothing keeps to the limits."""
        stops = [num_layers] if left == 1 else range(start + 1, num_layers - left + 2)
        found = [choice for stop in stops if (choice := after(start, stop, left)) is not None]
        return min(found, default=None)

    def after(start: int, stop: int, left: int) -> tuple[float, tuple[int, ...]] | None:
        cost = profile._stretch(start, stop)
        if cost.seconds > most_s or cost.num_bytes > most_bytes:
            return None
        mine = float(cost.num_bytes) if by_bytes else cost.seconds
        if left == 1:
            return mine, (stop - start,)
        others = rest(stop, left - 1)
        return None if others is None else (max(mine, others[0]), (stop - start, *others[1]))

    best = rest(0, num_stages)
    return None if best is None else best[1]
