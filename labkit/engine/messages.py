"""What the engine process and its ranks say to each other: one small message each way per step.

Messages are msgpack, framed by a 4-byte little-endian length, over one control socket a rank. A step plan is complete
in itself (token ids, positions, block tables), so a rank keeps nothing about a request between steps: preemption,
requeueing and a switch of layout need no message of their own. Integers that a tensor needs travel as raw int32
(little-endian) so that a rank wraps them without a loop. All instants are nanoseconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import msgspec

from labkit.engine.bench_messages import AnyBench, AnyBenched
from labkit.engine.wire_form import Message

# ---- engine to rank -------------------------------------------------------------------------------------------------


class Configure(Message):
    """Take this layout: drop the old weights and groups, build the new ones. Answered by `Configured`."""

    epoch: int
    """Counts switches; a step of another epoch is dropped."""
    layout: str
    """`Layout` slug. Its ranks are first_rank .. first_rank + world_size - 1 of the pool; a rank beyond is idle."""
    model: str
    """Folder with config.json (and safetensors), or the path of a config.json."""
    seed: int
    """Seed of the random weights, used when the folder has no safetensors."""
    dtype: str
    """float32, bfloat16 or float16."""
    memory_bytes: int
    """Budget of weights plus KV for this rank; 0: the device's default (`engine.memory`)."""
    block_size: int
    max_batched_tokens: int
    max_num_seqs: int
    threads: int
    fabric: str
    """shm, gloo or nccl."""
    record: bool
    """Whether the door records collectives."""
    graphs: bool
    """CUDA graphs (or, in tests, the same padded path without capture) for decode steps."""
    nodes: list[int] = []
    """The node of each rank of the pool; empty: all on one. What spans nodes does not go over shared memory."""
    expert_capacity: float = 0.0
    """Rows that an expert takes in a step, as a multiple of an even share; 0: all, none is dropped."""
    placements: list[list[list[int]]] = []
    """For each layer, for each rank of an ep group, its experts; [] (for a layer, or at all): plain order."""
    first_rank: int = 0
    """Where the layout's ranks begin: several layouts with roles stand beside each other in a deployment."""
    deployment: str = ""
    """All of them, where there are several; else empty."""


class AllocateKV(Message):
    """Allocate this many KV blocks (the minimum over the replica's ranks). Answered by `Ready`."""

    epoch: int
    num_blocks: int


class SampleSpec(Message):
    """How the last position of one sequence of a step is turned into a token."""

    index: int
    """Which sequence of the step (row of `query_lens`)."""
    temperature: float = 0.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    seed: int = 0
    position: int = 0
    """Number of tokens generated so far: with the seed it fixes the draw, whatever the batch."""
    logprobs: int = -1
    """-1: none; k: the chosen token's logprob and the k most likely."""


class Step(Message):
    """One forward pass of one replica: `num_seqs` sequences, their new tokens, and who gets a sample."""

    epoch: int
    step_id: int
    token_ids: bytes
    """int32 [sum(query_lens)]: the new tokens of every sequence, one after another."""
    query_lens: bytes
    """int32 [num_seqs]: how many of them belong to each sequence."""
    context_lens: bytes
    """int32 [num_seqs]: tokens already in the KV cache before this step; a position is context + offset."""
    block_tables: bytes
    """int32 [sum(ceil((context+query)/block_size))]: each sequence's blocks, one after another."""
    sample: list[SampleSpec]
    num_prefill_seqs: int
    """Sequences [0, num_prefill_seqs) are prefill chunks, the rest are decodes (query_len 1)."""


class MoveKV(Message):
    """Hand the KV of one request from a replica to one of another pool; to every rank of both. Answered by `Moved`.

    Who gives what to whom follows from the two layouts (`labkit.layout.reshard`). Steps may come meanwhile; they do
    not touch these blocks.
    """

    epoch: int
    move_id: int
    """Counts upwards: all ranks carry out their moves in this order."""
    source: tuple[int, int]
    """(pool, replica in it)"""
    target: tuple[int, int]
    start: int
    """Tokens [start, stop) of the sequence."""
    stop: int
    source_blocks: bytes
    """int32: the sequence's blocks, from its first token on, as the source replica has them."""
    target_blocks: bytes


class Profile(Message):
    """Profile the steps to come. Answered by `Profiled`, once: when they are over, or a message of 0 steps comes."""

    epoch: int
    skip_steps: int
    num_steps: int


class Fault(Message):
    """For tests and drills: kind is raise, exit, hang, delay (seconds in each all-reduce of `layer`), or mute, unmute
    (the door's recording, between two steps: what it costs is measured so)."""

    kind: str
    seconds: float = 0.0
    layer: int = -1


class Ping(Message):
    """To a rank on another host: what time is it there? Answered by `Pong` at once, or after the step it is in."""

    sent_ns: int


class Shutdown(Message):
    pass


# ---- rank to engine -------------------------------------------------------------------------------------------------


class Hello(Message):
    token: str
    """The pool's secret; a connection that does not know it is closed."""
    rank: int
    pid: int
    host: str
    lifeline: bool
    """True on a rank's second connection, which carries nothing: when it closes, the rank exits at once."""
    device: str = ""
    """cpu, or cuda:0 NVIDIA H100 …"""
    versions: dict[str, str] = {}
    clock_ns: int = 0
    node: int = 0
    """Which of its torchrun's nodes it stands on."""
    clock: str = ""
    """`labkit.engine.clock.clock_id`: whose clock its instants are read from."""


class Pong(Message):
    sent_ns: int
    """The ping's, by the engine's clock; the other two by the rank's."""
    arrived_ns: int
    left_ns: int


class Memory(Message):
    """Bytes on one rank. `other` is what the rank's process or device uses beyond weights and KV."""

    weights: int = 0
    kv: int = 0
    other: int = 0
    free: int = 0
    """What is left of the budget."""
    weights_by_part: dict[str, int] = {}
    """ModelSpec part (embedding, attention, mlp, norm, head, …) to bytes."""
    beside: dict[str, int | None] = {}
    """`engine.memory.beside`: what an allocator holds besides; None where the backend cannot tell."""


class Configured(Message):
    epoch: int
    rank: int
    num_blocks: int
    """How many KV blocks fit beside the weights; -1: the weights alone exceed the budget (`error` says so)."""
    kv_block_bytes: int
    memory: Memory
    load_s: float
    groups_s: float
    error: str = ""


class Ready(Message):
    """Groups warmed, KV allocated: steps may come."""

    epoch: int
    rank: int
    memory: Memory
    warm_s: float


class Sampled(Message):
    """From the sampling rank (last stage, first tp rank) as soon as the ids are known."""

    epoch: int
    step_id: int
    token_ids: list[int]
    """One per SampleSpec, in order."""
    logprobs: list[tuple[float, list[tuple[int, float]]]] | None
    """Per SampleSpec: (logprob of the chosen token, [(token id, logprob), …] most likely first)."""
    start_ns: int
    end_ns: int


class StepStats(Message):
    """From every rank of the replica, after the step, off the critical path."""

    epoch: int
    step_id: int
    rank: int
    start_ns: int
    """When the step's message had arrived whole."""
    end_ns: int
    """When the forward pass (and sampling, where it samples) was over on the device."""
    ring: bytes
    """Rows of `labkit.measure.recorder.RING_DTYPE`, in order; empty when recording is off."""
    experts: bytes = b""
    """Rows of `labkit.measure.experts`, one for each MoE layer; empty for dense models."""


class Moved(Message):
    """What this rank gave or took of a `MoveKV` has been sent, or stands in its blocks."""

    epoch: int
    move_id: int
    rank: int
    sent_bytes: int
    start_ns: int
    end_ns: int


class Profiled(Message):
    epoch: int
    rank: int
    num_steps: int
    trace: bytes
    """Chrome trace events, gzipped JSON, with our tags (`labkit.engine.profiling`); empty when no step came."""
    offset_ns: int = 0
    """What leads its clock to the engine's, where they are of two hosts; set on arrival (`labkit.engine.clock`)."""


class Failed(Message):
    """The last words of a rank that raised."""

    rank: int
    error: str
    """One line."""
    traceback: str


EngineMessage = Configure | AllocateKV | Step | MoveKV | AnyBench | Profile | Fault | Ping | Shutdown
RankMessage = Hello | Pong | Configured | Ready | Sampled | StepStats | Moved | AnyBenched | Profiled | Failed

encode = msgspec.msgpack.Encoder().encode
decode_engine_message = msgspec.msgpack.Decoder(EngineMessage).decode
decode_rank_message = msgspec.msgpack.Decoder(RankMessage).decode
