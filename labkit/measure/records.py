"""The rows that a run leaves: one per request, one per step, one per rank's memory.

A request's row is made by the load client (what a user would see); the server's share of it (`ServerTimes`)
arrives on the event stream and is joined by request id. Instants are nanoseconds of CLOCK_MONOTONIC of the
host that the field names.
"""

from __future__ import annotations

import msgspec

STATUSES = ("completed", "failed", "refused", "cancelled", "unsent")


class ServerTimes(msgspec.Struct, gc=False):
    """What only our engine can tell of a request. Event `request` on the stream; server host's clock."""

    request_id: str
    run_id: str
    layout: str
    replica: int
    routed_because: str
    received_ns: int
    """The HTTP request had been read whole."""
    first_start_ns: int
    """The first step that carried it began, on its first stage."""
    first_end_ns: int
    """That rank had sampled the first token."""
    last_end_ns: int
    """That rank had sampled the last token."""
    finished_ns: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reason: str
    num_preemptions: int
    requeued: bool
    error: str = ""
    # sums until the first token, on the path of the rank that sampled
    queue_ns: int = 0
    """received to first step, plus the gaps between the steps that carried its chunks."""
    compute_ns: int = 0
    wait_ns: int = 0
    transfer_ns: int = 0
    # the same sums from the first token to the last
    decode_queue_ns: int = 0
    decode_compute_ns: int = 0
    decode_wait_ns: int = 0
    decode_transfer_ns: int = 0
    # of a request that was prefilled in one pool and decoded in another
    handoff_queue_ns: int = 0
    """From its first token until its KV began to move: the decode pool had no room yet."""
    handoff_ns: int = 0
    """Until all of its KV stood in the decode pool's blocks."""
    handoff_bytes: int = 0
    released_ns: int = 0
    """The first token was let go to the user only then; 0: as soon as it was sampled."""


class RequestRecord(msgspec.Struct, gc=False):
    """What the client saw. `n` is the server's completion_tokens; an instant that never came is 0."""

    request_id: str
    index: int
    """Position in the schedule."""
    status: str
    """One of STATUSES."""
    scheduled_ns: int
    sent_ns: int = 0
    first_ns: int = 0
    """Arrival of the first chunk that bore a token."""
    last_ns: int = 0
    """Arrival of the last chunk that bore a token."""
    end_ns: int = 0
    """The stream was over."""
    asked_prompt_tokens: int = 0
    asked_output_tokens: int = 0
    prompt_tokens: int = 0
    """usage.prompt_tokens."""
    cached_tokens: int = 0
    """usage.prompt_tokens_details.cached_tokens."""
    n: int = 0
    """usage.completion_tokens."""
    chunk_ns: list[int] = []
    """Arrival of each chunk that bore tokens."""
    chunk_tokens: list[int] = []
    """How many tokens each of those bore."""
    http_status: int = 0
    finish_reason: str = ""
    error: str = ""
    warmup: bool = False
    server: ServerTimes | None = None


class StepRecord(msgspec.Struct, gc=False):
    """One step of one replica, merged over its ranks. Event `steps` carries a list of them."""

    run_id: str
    epoch: int
    step_id: int
    replica: int
    layout: str
    start_ns: int
    """Engine: plan handed to the sockets."""
    end_ns: int
    """Engine: token ids back."""
    num_prefill_seqs: int
    num_decode_seqs: int
    prefill_tokens: int
    context_tokens: int
    """KV tokens read."""
    # per rank of the replica, in the order of `ranks`
    ranks: list[int]
    rank_start_ns: list[int]
    rank_end_ns: list[int]
    compute_ns: list[int]
    wait_ns: list[int]
    transfer_ns: list[int]
    collective_bytes: int
    num_collectives: int
    # of a mixture of experts; the lists by rank are in the order of `ranks`
    expert_tokens: list[int] = []
    """By expert: tokens that the step's sequences sent to it, all layers together, dropped ones included."""
    expert_rows: list[int] = []
    """By rank: rows that its experts computed, for whomever; padding included."""
    expert_sent_bytes: list[int] = []
    """By rank: what it sent to other ranks, tokens there and outputs back."""
    expert_ns: list[int] = []
    """By rank: time inside its experts' products."""
    expert_wait_ns: list[int] = []
    """By rank: waited, in the combines, for the busiest rank."""
    num_dropped: int = 0
    """Tokens (each for one expert) beyond an expert's capacity."""
    idle_ns: list[int] = []
    """Per rank: in receives, before the stage in front had sent (a bubble)."""
    query_keys: list[int] = []
    """By pcp rank: keys seen by all the prompts' queries that it computed; mean over largest is the balance."""
    in_flight_bytes: int = 0
    """The most hidden-state bytes under way between stages, sent and not received, as this step sent some."""
    # what a step's cost is fitted on, beside the counts above (`labkit.plan.work.StepWork` has the same sums)
    prefill_pairs: int = 0
    """(query, key) pairs that full causal attention of the prompts' chunks looks at."""
    prefill_context: int = 0
    """Of `context_tokens`, what the prompts' chunks found in the cache."""
    num_sampled: int = 0
    """Rows that got logits: the decodes, and the prompts that ended here."""


class MemoryRecord(msgspec.Struct, gc=False):
    rank: int
    weights: int
    kv: int
    other: int
    free: int
    weights_by_part: dict[str, int] = {}
    beside: dict[str, int | None] = {}
    """`labkit.measure.memory.BESIDE`: what an allocator holds besides, as measured while the layout was set up. None:
    this backend cannot tell."""


class TelemetryRecord(msgspec.Struct, gc=False):
    """One device, process or host at one instant."""

    t_ns: int
    """CLOCK_MONOTONIC of the server's host."""
    source: str
    """nvml or psutil."""
    kind: str
    """gpu, rank or host."""
    index: int
    """Of the GPU, or the rank; 0 for the host."""
    values: dict[str, float]
    """Units in the names: utilisation_percent, memory_used_bytes, power_w, sm_mhz, pcie_tx_bytes_per_s …"""
    throttles: list[str] = []
    """Why the clocks are below what they could be."""


class ClockRecord(msgspec.Struct):
    """The monotonic clock of a host that is not the engine's, as round trips over the control link told it."""

    host: str
    ranks: list[int]
    """Whose instants were read from it."""
    offset_ns: int
    """Was added to them."""
    uncertainty_ns: int | None
    """The true offset lies within ± this; None: one way only was seen, which is no estimate."""
    best_round_trip_ns: int
    num_round_trips: int


class Environment(msgspec.Struct):
    """Where a run took place: everything that a figure's reader must know."""

    host: str
    backend: str
    """cpu or cuda."""
    fabric: str
    device: str
    num_cores: int
    num_ranks: int
    """Ranks that the layout uses."""
    threads_per_rank: int
    dtype: str
    versions: dict[str, str]
    seed: int
    started_at: str
    """ISO 8601, UTC."""
    clocks: list[ClockRecord] = []
    """Of other hosts; empty: all instants are of one clock."""
