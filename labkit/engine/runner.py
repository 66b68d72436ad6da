"""What a rank does: take a layout, allocate its share of the KV cache, and run one step when told to.

A rank keeps nothing about a request; a step's message is whole in itself. A switch of layout frees the old
weights before it makes the new ones, so two models never stand in memory together, and says in numbers what
did not fit. On a CPU a step's instants are the monotonic clock's; on CUDA they are events, read once the step
is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from labkit.engine import memory
from labkit.engine.batches import Shape, build, windows_of
from labkit.engine.bench_messages import Bench, BenchDevice, Benched, DeviceBenched
from labkit.engine.graphs import DecodeGraphs
from labkit.engine.messages import AllocateKV, Configure, Configured, Memory, Moved, MoveKV, Ready, Sampled, Step
from labkit.engine.mover import KVMover
from labkit.engine.sampler import sample
from labkit.engine.step_clock import CudaClock, HostClock
from labkit.layout import (
    Deployment,
    LayerPlacements,
    Layout,
    LayoutError,
    block_tokens,
    require_legal,
    stored_block,
    weight_slices,
)
from labkit.measure.recorder import phase_code
from labkit.model.attention import Batch
from labkit.model.checkpoint import CheckpointError, Weights, open_source, slice_bytes
from labkit.model.decoder import Decoder
from labkit.model.kv_cache import KVCache, block_bytes
from labkit.model.rope import rotation_table
from labkit.model.spec import ModelSpec, load_spec, model_dir
from labkit.parallel.bench import bench
from labkit.parallel.context import ContextRanks
from labkit.parallel.expert import expert_parallel
from labkit.parallel.pipeline import Boundary

if TYPE_CHECKING:
    from labkit.parallel.mesh import Mesh

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class _Model:
    """One layout's state on this rank, from `configure` until the next one."""

    message: Configure
    layout: Layout
    rank: int
    """In the layout."""
    spec: ModelSpec
    mesh: Mesh
    decoder: Decoder
    boundary: Boundary
    budget_bytes: int
    other_bytes: int
    samples: bool
    cache: KVCache | None = None
    turns: Tensor | None = None
    shape: Shape | None = None
    graphs: DecodeGraphs | None = None
    mover: KVMover | None = None


class Runner:
    """`mesh_factory` gives this rank its groups under a `Configure`; all ranks of the pool call it, in one
    order.
    """

    def __init__(self, rank: int, mesh_factory: Callable[[Configure], Mesh], device: torch.device) -> None:
        self.rank, self.mesh_factory, self.device = rank, mesh_factory, device
        self._model: _Model | None = None
        self._delay = (0.0, -1)

    # ---- a switch

    def configure(self, message: Configure) -> Configured:
        """Drops the old layout and loads the new one's weights. What is refused comes back as
        `Configured.error`.
        """
        self.release()
        if self.device.type == "cpu":
            torch.set_num_threads(message.threads)
        began = time.perf_counter()
        layout = Layout.parse(message.layout)
        mesh = self.mesh_factory(message)
        groups_s = time.perf_counter() - began
        if self.rank - message.first_rank >= layout.world_size:
            return Configured(message.epoch, self.rank, 0, 0, Memory(), 0.0, groups_s)
        try:
            configured = self._load(message, layout, mesh)
        except (memory.DoesNotFitError, LayoutError, CheckpointError) as refusal:
            needed = getattr(refusal, "memory", Memory())
            return Configured(message.epoch, self.rank, -1, 0, needed, 0.0, groups_s, error=str(refusal))
        configured.groups_s = groups_s
        return configured

    def _load(self, message: Configure, layout: Layout, mesh: Mesh) -> Configured:
        began = time.perf_counter()
        rank = self.rank - message.first_rank
        spec, dtype = load_spec(message.model), DTYPES[message.dtype]
        require_legal(layout, spec, engine=True)
        placements = _placements(message)
        slices = weight_slices(layout, spec, rank, placements)
        needed = slice_bytes(slices, dtype)
        num_ranks = Deployment.parse(message.deployment or message.layout).world_size
        budget = message.memory_bytes or memory.default_budget(self.device, num_ranks, sum(needed.values()))
        memory.check_weights(spec.name, str(layout), self.rank, needed, budget)
        source = open_source(model_dir(message.model), spec, message.seed)
        with torch.inference_mode():
            weights = Weights(source, slices, dtype, self.device)
            moe = expert_parallel(
                layout, spec, mesh, self.device, placements=placements, capacity=message.expert_capacity
            )
            decoder = Decoder(spec, layout, rank, weights, mesh.tp, moe)
        boundary = Boundary(mesh.pp, spec.hidden_size, dtype, self.device)
        used = decoder.bytes_by_part()
        heads = len(decoder.layers), decoder.num_kv_heads
        block = block_bytes(*heads, spec.head_dim, stored_block(layout, message.block_size), dtype)
        fitting = memory.blocks_that_fit(spec.name, self.rank, used, budget, block)
        most = memory.most_blocks(message.max_num_seqs, spec.max_positions, block_tokens(layout, message.block_size))
        num_blocks = min(fitting, most)
        other = max(0, memory.used_bytes(self.device) - sum(used.values()))
        samples = layout.sampling_rank(layout.replica_of(rank)) == rank
        self._model = _Model(message, layout, rank, spec, mesh, decoder, boundary, budget, other, samples)
        report = memory.report(used, 0, budget, other)
        load_s = time.perf_counter() - began
        return Configured(message.epoch, self.rank, num_blocks, block, report, load_s, 0.0)

    def allocate(self, message: AllocateKV) -> Ready:
        """Allocates the cache, then runs one small step of each kind, so no request meets cold code."""
        began = time.perf_counter()
        model = self._configured()
        with torch.inference_mode():
            self._make_cache(model, message.num_blocks)
            self._make_mover(model)
            model.mesh.warm()
            self._warm(model)
            self._fill(model)
        assert model.cache is not None
        weights, kv_bytes = model.decoder.bytes_by_part(), model.cache.num_bytes
        besides = memory.beside(self.device, sum(weights.values()), kv_bytes)
        report = memory.report(weights, kv_bytes, model.budget_bytes, model.other_bytes, besides)
        return Ready(message.epoch, self.rank, report, time.perf_counter() - began)

    def _make_cache(self, model: _Model, num_blocks: int) -> None:
        spec, decoder, layout = model.spec, model.decoder, model.layout
        size, stored = (of(layout, model.message.block_size) for of in (block_tokens, stored_block))
        dtype, heads = DTYPES[model.message.dtype], decoder.num_kv_heads
        num_layers = len(decoder.layers)
        model.cache = KVCache(num_layers, num_blocks, heads, spec.head_dim, stored, dtype, self.device)
        num_positions = max(size, min(spec.max_positions, num_blocks * size))
        model.turns = rotation_table(spec.rope, spec.head_dim, num_positions, self.device)
        windows = windows_of(spec.window(layer.index) for layer in decoder.layers)
        model.shape = Shape(size, num_blocks, windows, dtype, self.device, ContextRanks.of(model.mesh))
        ragged = spec.moe is not None and (layout.ep > 1 or model.message.expert_capacity > 0)
        # (how many rows an exchange or a capacity leaves is known on the host only: such steps run plain, as do
        # those whose keys lie on several ranks)
        if model.message.graphs and not ragged and layout.dcp == 1:
            width = None if model.boundary.is_first else spec.hidden_size
            model.graphs = DecodeGraphs(
                self._forward, model.shape, model.message.max_num_seqs, width, layout.tp if layout.sp else 1
            )

    def _make_mover(self, model: _Model) -> None:
        message = model.message
        deployment = Deployment.parse(message.deployment) if message.deployment else None
        if deployment is not None and self.rank in deployment.handoff_ranks:
            assert model.cache is not None
            model.mover = KVMover(model.mesh.handoff, self.rank, deployment, model.spec, message.block_size,
                                  model.cache, self.device)  # fmt: skip

    def _warm(self, model: _Model) -> None:
        assert model.shape is not None
        for step in memory.warm_steps(model.message, model.shape.spare_block):
            batch = build(step, model.shape)
            self._in_line(model, step, len(batch.token_ids), partial(self._forward, batch))
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _fill(self, model: _Model) -> None:
        """One full step, where its peak can be measured. (A CPU's cannot, and its time is worth something.)"""
        if self.device.type != "cuda":
            return
        assert model.shape is not None
        memory.forget_peak(self.device)
        step = memory.full_step(model.message, model.shape.spare_block, model.shape.block_size)
        batch = build(step, model.shape)
        self._in_line(model, step, len(batch.token_ids), partial(self._forward, batch))
        torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Frees weights and cache; graphs go first, since they hold the groups they were captured with."""
        if self._model is not None and self._model.graphs is not None:
            self._model.graphs.destroy()
        if self._model is not None and self._model.mover is not None:
            self._model.mover.close()
        self._model = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # ---- KV from pool to pool

    @torch.inference_mode()
    def move(self, message: MoveKV) -> None:
        """Begin this rank's part; `moved` tells when it is over."""
        mover = self._configured().mover
        if mover is None:
            raise RuntimeError(f"rank {self.rank} hands no KV over in this layout, and was told to")
        mover.begin(message)

    @torch.inference_mode()
    def moved(self) -> list[Moved]:
        """Moves that are over since the last call."""
        mover = self._configured().mover
        return [] if mover is None else mover.landed()

    # ---- a measurement

    def bench(self, message: Bench | BenchDevice) -> Benched | DeviceBenched:
        """One collective of the layout that stands, or the device's own work, over and over."""
        model = self._configured()
        return bench(message, self.rank, model.mesh, self.device)

    # ---- a step

    @torch.inference_mode()
    def step(self, message: Step) -> tuple[Sampled | None, int, int]:
        """One forward pass: (tokens on the sampling rank, start, end), instants in monotonic ns.

        A step of another epoch is dropped: None and an empty interval.
        """
        start_ns = time.monotonic_ns()
        model = self._model
        if model is None or model.shape is None or message.epoch != model.message.epoch:
            return None, start_ns, start_ns
        clock = CudaClock() if self.device.type == "cuda" else HostClock(start_ns)
        logits = self._logits(model, message)
        ids, logprobs = sample(logits, message.sample) if model.samples and logits is not None else ([], None)
        start_ns, end_ns = clock.read()
        if not model.samples:
            return None, start_ns, end_ns
        return Sampled(message.epoch, message.step_id, ids, logprobs, start_ns, end_ns), start_ns, end_ns

    def _logits(self, model: _Model, message: Step) -> Tensor | None:
        """[len(sample), vocab_size] on the rank that samples, None on the others."""
        assert model.shape is not None
        if not message.query_lens:
            return model.decoder.take_part(phase_code(0, 0))
        if model.graphs is not None and model.graphs.takes(message):
            num_rows = model.graphs.num_rows(len(message.query_lens) // 4)
            return self._in_line(model, message, num_rows, partial(model.graphs.run, message))
        batch = build(message, model.shape)
        return self._in_line(model, message, len(batch.token_ids), partial(self._forward, batch))

    def _in_line(
        self, model: _Model, message: Step, num_rows: int, stage: Callable[[Tensor | None], Tensor | None]
    ) -> Tensor | None:
        """This stage between its neighbours: logits on the last one, None where they went on as hidden states.

        With `+sp` a rank hands over the rows that it holds.
        """
        num_seqs, boundary = len(message.query_lens) // 4, model.boundary
        model.decoder.door.tag(phase=phase_code(message.num_prefill_seqs, num_seqs - message.num_prefill_seqs))
        out = stage(boundary.receive(model.decoder.stream.held(num_rows)))
        if boundary.is_last:
            return out
        assert out is not None
        # A graph writes its output where it wrote it last time, and that may not have been received yet.
        boundary.send(out.clone() if model.graphs is not None else out)
        return None

    def _forward(self, batch: Batch, hidden: Tensor | None) -> Tensor | None:
        model = self._configured()
        assert model.cache is not None and model.turns is not None
        return model.decoder.forward(batch, model.cache, model.turns, hidden)

    def _configured(self) -> _Model:
        if self._model is None:
            raise RuntimeError(f"rank {self.rank} has no layout: it must be configured before it allocates or steps")
        return self._model

    @property
    def delay(self) -> tuple[float, int]:
        """(seconds, layer) that this rank waits before each sum over ranks of that layer (-1: of every layer)."""
        return self._delay

    @delay.setter
    def delay(self, value: tuple[float, int]) -> None:
        self._delay = value
        door = self._configured().decoder.door
        door.delay_s, door.delay_layer = value


def _placements(message: Configure) -> LayerPlacements:
    return tuple(tuple(tuple(experts) for experts in layer) for layer in message.placements)
