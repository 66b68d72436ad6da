"""Requests that are only counted: a simulated one has lengths, and ids of what its prompt shares, but no tokens.

They are the engine's own `Request`, so that its scheduler takes them; prompt, answer and blocks are numbers with the
faces of the lists that stand there in the running engine.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from labkit.engine.request import Phase, Request, SamplingParams
from labkit.load.trace import MOONCAKE_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class SimRequest:
    """What is asked, when."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    """What the prompt begins with: one id for each `block_tokens` of it; equal ids are equal tokens. The rest of the
    prompt, and the answer, are nobody else's."""
    block_tokens: int = MOONCAKE_BLOCK_TOKENS


class Answer:
    """A list of tokens of which only the number is known."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def append(self, token: int) -> None:
        self.count += 1

    def __getitem__(self, index: int) -> int:
        return 0


class Held:
    """Blocks of one request of which only the number is known."""

    __slots__ = ("count", "full", "segment")

    def __init__(self) -> None:
        self.count = self.full = 0
        self.segment: list[Any] | None = None
        """What a counted pool still caches of them after they were given back."""

    def __len__(self) -> int:
        return self.count

    def extend(self, blocks: Sequence[int]) -> None:
        self.count += len(blocks)

    def __delitem__(self, index: slice) -> None:
        self.count = self.full = 0


class Prompt:
    """A prompt that may begin as others do: `key` names what a block of it holds."""

    __slots__ = ("num_tokens", "index", "block_ids", "block_tokens")

    def __init__(self, asked: SimRequest, index: int) -> None:
        self.num_tokens, self.index = asked.prompt_tokens, index
        self.block_ids, self.block_tokens = asked.block_ids, asked.block_tokens

    def __len__(self) -> int:
        return self.num_tokens

    def key(self, start: int, stop: int) -> tuple[int, ...]:
        """Equal for equal tokens [start, stop) behind equal beginnings, of prompt and answer."""
        tokens, ids = self.block_tokens, self.block_ids
        if stop > min(len(ids) * tokens, self.num_tokens):
            return (-1, self.index, start)
        first, last = start // tokens, (stop - 1) // tokens
        return (start % tokens, *ids[first : last + 1])


WAITING = Phase.WAITING
NO_TOKENS: frozenset[int] = frozenset()
_LIMITS: dict[int, SamplingParams] = {}


def _params(output_tokens: int) -> SamplingParams:
    found = _LIMITS[output_tokens] = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
    return found


class Job(Request):
    """A request on its way through the simulator; `index` is its place in what was asked."""

    __slots__ = ("index", "final", "num_prompt", "order", "since", "slot", "is_promised")

    output: Any
    blocks: Any
    index: int
    final: int
    """KV tokens at its end."""
    num_prompt: int
    order: int
    """Grows with each admission of its replica."""
    since: int
    """Tick at which it began to decode (see `labkit.plan.sim.scheduler`)."""
    slot: int
    """It takes a block at each tick that leaves this over when divided by the block size."""
    is_promised: bool

    def __init__(self, index: int, asked: SimRequest, counted: bool) -> None:
        output = asked.output_tokens
        self.id = cast(Any, index)  # any hashable does, and a text takes longer to make
        self.index = index
        self.prompt = cast(Any, range(asked.prompt_tokens) if counted else Prompt(asked, index))
        self.params = _LIMITS.get(output) or _params(output)
        self.output = Answer()
        self.blocks = Held() if counted else array("i")
        self.num_prompt = asked.prompt_tokens
        self.final = asked.prompt_tokens + output - 1
        self.phase = WAITING
        self.num_computed = self.num_cached = self.in_flight = self.arriving = self.num_preemptions = 0
        self.expected_tokens = self.num_reserved = self.num_published = self.prefix_node = 0
        self.order = self.since = self.slot = 0
        self.aborted = self.is_promised = False
        self.stop_ids = NO_TOKENS

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + cast(int, self.output.count)

    def tokens(self, start: int, stop: int) -> Any:
        """Itself: the simulator's pools ask a prompt for keys, never for tokens."""
        return self
