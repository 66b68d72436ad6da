"""A request as the engine sees it: what was asked, and the instants of its life on the server.

Phase is a field, not something read off a token count: a preempted sequence that comes back with a prefix
hit is in `PREFILL` until its last prompt token has been computed again. Instants are nanoseconds of
CLOCK_MONOTONIC.
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field


class Phase(enum.Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    HANDOFF = "handoff"
    """Its blocks are there, and its KV is on the way from the pool that computed it."""
    DECODE = "decode"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestRefused(ValueError):
    """The request can never be served as asked; the message says why, with the arithmetic (HTTP 400)."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit (vLLM's -1 is accepted at the door and becomes 0)."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One sequence, equal only to itself. The scheduler owns every field below the line."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    received_ns: int
    run_id: str = ""
    """The run that sent it; empty for a visitor's own."""
    seed: int = 0
    """The seed that the draws use: params.seed, or one drawn on arrival."""
    prefix_hint: str = ""

    # ---- state
    phase: Phase = Phase.WAITING
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Tokens of prompt + output whose KV is in the cache, or will be after the steps in flight."""
    num_cached: int = 0
    """Of those, how many came from the prefix cache at the (last) admission."""
    blocks: array[int] = field(default_factory=lambda: array("i"))
    in_flight: int = 0
    """Steps (and a handoff) that carry this request and have not returned: its blocks live until this is 0."""
    arriving: int = 0
    """Leading tokens whose KV another pool has computed, and which are to come from there."""
    aborted: bool = False
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0
    requeued: bool = False
    """It lived through a switch of layout: left out of both layouts' figures."""
    replica: int = -1
    routed_because: str = ""

    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the answer (the model's own unless ignore_eos, and those asked for)."""
    expected_tokens: int = 0
    """KV tokens that the request is expected to hold at its end: prompt + expected answer - 1."""
    num_reserved: int = 0
    """Blocks promised to this request and not taken yet."""
    num_published: int = 0
    """Leading blocks that the prefix cache knows, and the cache's name for what they hold together."""
    prefix_node: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Token ids [start, stop) of prompt + output."""
        split = len(self.prompt)
        if stop <= split:
            return self.prompt[start:stop]
        return self.prompt[start:] + tuple(self.output[max(0, start - split) : stop - split])
