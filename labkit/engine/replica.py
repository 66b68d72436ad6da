"""One replica of the running engine: its ranks, its scheduler, and the steps on their way to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from labkit.engine.plan import StepPlan
from labkit.engine.request import Request
from labkit.engine.router import ReplicaView
from labkit.engine.scheduler import Scheduler
from labkit.measure.recorder import Piece
from labkit.measure.stages import InFlight

_SMOOTHING = 0.1


@dataclass(slots=True, eq=False)
class Flight:
    """A step between its plan and the last of its ranks' figures."""

    step_id: int
    plan: StepPlan
    requests: list[Request]
    context_tokens: int
    replica: Replica
    epoch: int
    start_ns: int
    """The plan was handed to the sockets."""
    end_ns: int = 0
    """The token ids were back."""
    pieces: dict[int, Piece] = field(default_factory=dict)
    """By rank."""
    experts: dict[int, bytes] = field(default_factory=dict)
    """By rank: rows of `labkit.measure.experts`."""
    companions: list[Flight] = field(default_factory=list)
    """The steps of a round (this one too) when replicas share experts; else none."""

    @property
    def is_whole(self) -> bool:
        return self.end_ns > 0 and len(self.pieces) == len(self.replica.ranks)

    @property
    def round(self) -> list[Flight]:
        """The steps whose figures are merged with this one's."""
        return self.companions or [self]

    @property
    def silent_ranks(self) -> list[int]:
        """Ranks whose word is missing; with companions, theirs too."""
        return [rank for flight in self.round for rank in flight.replica.ranks if rank not in flight.pieces]


class Replica:
    """chain: one rank of each stage, in order; its last is the one that samples. layout: its pool's slug."""

    def __init__(
        self, index: int, ranks: tuple[int, ...], chain: tuple[int, ...], scheduler: Scheduler,
        *, pool: int = 0, index_in_pool: int = 0, role: str = "any", layout: str = "",
    ) -> None:  # fmt: skip
        self.index, self.ranks, self.chain, self.sampling_rank = index, ranks, chain, chain[-1]
        self.pool, self.index_in_pool, self.role, self.layout = pool, index_in_pool, role, layout
        self.scheduler = scheduler
        self.num_in_flight = 0
        self.is_woken = False
        """A look at the scheduler is due in this turn of the event loop."""
        self.in_flight = InFlight()
        self._last_end_ns = 0
        self.us_per_token = 0.0
        """Measured, smoothed: from the step before (or the plan, when that was later) to the ids, over the tokens."""

    def note_pace(self, flight: Flight) -> None:
        tokens = flight.plan.prefill_tokens + flight.plan.num_decode_seqs
        if not tokens:
            return
        began_ns = max(flight.start_ns, self._last_end_ns)  # steps in flight overlap
        self._last_end_ns = flight.end_ns
        us_per_token = (flight.end_ns - began_ns) / 1000 / tokens
        self.us_per_token += (us_per_token - self.us_per_token) * (_SMOOTHING if self.us_per_token else 1.0)

    def view(self, prompt: tuple[int, ...]) -> ReplicaView:
        return self.scheduler.view(prompt, self.us_per_token)

    def describe(self) -> dict[str, Any]:
        """As the page shows it: counts of requests and of KV blocks, and whose ranks they are."""
        pool = self.scheduler.pool
        return {
            "waiting": self.scheduler.num_waiting,
            "running": self.scheduler.num_running,
            "kv_used_blocks": pool.num_blocks - pool.num_free,
            "kv_total_blocks": pool.num_blocks,
            "kv_block_tokens": pool.block_size,
            "ranks": list(self.ranks),
            "pool": self.pool,
            "role": self.role,
        }
