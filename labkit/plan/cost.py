"""The time of a step on GPUs that one may not have: rooflines over what a rank holds, and collectives by topology.

`step_cost(layout, spec, hardware, settings)` is a `StepCost`: seconds of a step, of the interval until the next may
follow, by part, and of a handoff. Stages follow each other, so `seconds` is their sum and `interval` the slowest. With
attention-DP all replicas step together, so the experts see everybody's tokens; replicas are taken as equally busy
where the work does not say what their mean is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from labkit.layout import Layout, kv_bytes_per_token, require_legal
from labkit.model.shapes import DTYPE_BYTES, ModelSpec
from labkit.plan.calibration import measured_cost
from labkit.plan.engine_cost import (
    GRAPH_TOKENS,
    EngineConstants,
    axis_seconds,
    engine_constants,
    graph_padding,
    launch_seconds,
    not_shorter,
    work_seconds,
)
from labkit.plan.hardware import Hardware
from labkit.plan.stage_shape import StageShape, stage_shapes
from labkit.plan.stage_time import stage_time
from labkit.plan.work import EngineSettings, StepCost, StepWork

PARTS = ("matrices", "experts", "attention", "kv", "head", "elementwise", "overhead")
EXPERT_SKEW = 1.0
"""Load of the busiest expert rank over the mean one, unless the caller knows it (labkit.layout.imbalance)."""
KV_BYTES = {"auto": 0, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "bfloat16": 2, "float16": 2}


def kv_number_bytes(spec: ModelSpec, settings: EngineSettings) -> int:
    """Bytes of one cached number. Raises ValueError for a dtype that is unknown."""
    if settings.kv_cache_dtype not in KV_BYTES:
        raise ValueError(
            f"kv_cache_dtype {settings.kv_cache_dtype!r} is unknown: choose one of {', '.join(KV_BYTES)}."
        )
    return KV_BYTES[settings.kv_cache_dtype] or DTYPE_BYTES[spec.dtype]


def step_cost(
    layout: Layout, spec: ModelSpec, hardware: Hardware, settings: EngineSettings, engine: str = "vllm",
    skew: float = EXPERT_SKEW, version: str = "", graph_tokens: int | None = None,
) -> StepCost:  # fmt: skip
    """The cost of a replica's steps. `skew`: the busiest expert rank's load over the mean's beyond what uniform routing
    gives, at least 1. `version`: of the engine, where its rows were measured. `graph_tokens`: the largest step that its
    graphs cover, where that is not its default. Of our own engine on the machine at hand: the cost that `labkit
    calibrate` measured of this model and layout, where it did.

    Raises LayoutError when the model does not allow the layout, ValueError when there are too few GPUs.
    """
    require_legal(layout, spec)
    if layout.world_size > hardware.num_gpus:
        raise ValueError(f"{layout} needs {layout.world_size} GPUs, and {hardware.name} has {hardware.num_gpus}.")
    if skew < 1:
        raise ValueError(f"skew is {skew}; the busiest rank has at least the mean's load: give 1 or more.")
    if engine == "labkit" and hardware.device.name == "here" and (measured := measured_cost(layout, spec)) is not None:
        return measured
    constants = engine_constants(engine, spec, version)
    number_bytes = kv_number_bytes(spec, settings)
    shapes = stage_shapes(layout, spec, hardware, number_bytes, engine != "labkit")
    handoff = sum(
        kv_bytes_per_token(layout, spec, layout.rank_of(layout.coords(0)._replace(pp=stage)), number_bytes)
        for stage in range(layout.pp)
    )
    link = hardware.across or hardware.fast or hardware.inside
    bandwidth = hardware.device.memory_bandwidth.value
    return RooflineCost(
        shapes, constants, bandwidth, skew, handoff / layout.pp / link.message_bandwidth.value,
        link.message_latency_s.value, largest_graph(engine, settings) if graph_tokens is None else graph_tokens,
    )  # fmt: skip


def largest_graph(engine: str, settings: EngineSettings) -> int:
    """Tokens of the largest step that an engine's graphs cover by default: vLLM captures up to twice max_num_seqs and
    at most GRAPH_TOKENS (its `max_cudagraph_capture_size`)."""
    return min(2 * settings.max_num_seqs, GRAPH_TOKENS.get(engine, 0)) if settings.cuda_graphs else 0


@dataclass(frozen=True)
class RooflineCost:
    """A `StepCost` from coefficients alone."""

    shapes: tuple[StageShape, ...]
    constants: EngineConstants
    bandwidth: float
    skew: float
    handoff_token_s: float
    handoff_latency_s: float
    graph_tokens: int = 0
    """Up to so many tokens of a step, graphs replay what a prompt launches."""

    @cached_property
    def _stages(self) -> list[Callable[[StepWork], float]]:
        return [
            stage_time(shape, self.constants, self.bandwidth, self._skew(shape), self.graph_tokens)
            for shape in self.shapes
        ]

    def seconds(self, work: StepWork) -> float:
        seconds = 0.0
        for stage in self._stages:
            seconds += stage(work)
        return self.constants.step_s + seconds

    def interval(self, work: StepWork) -> float:
        return self.constants.step_s + max(stage(work) for stage in self._stages)

    def shared_rows(self, rows: Sequence[float]) -> float:
        """What experts that replicas share see of each of them, by the new tokens of all. Graphs are replayed for all
        replicas or for none, and then all are padded to the largest (vLLM's `v1/worker/dp_utils.py`)."""
        largest = max(rows)
        if largest <= self.graph_tokens:
            return largest + graph_padding(largest, self.graph_tokens)
        return sum(rows) / len(rows)

    def _skew(self, shape: StageShape) -> float:
        return self.skew if shape.expert_spread > 1 else 1.0

    def parts(self, work: StepWork) -> dict[str, float]:
        """Waiting for the host's launches counts as overhead."""
        total = dict.fromkeys(PARTS, 0.0)
        total["overhead"] = self.constants.step_s
        padding = graph_padding(work.prefill_tokens + work.decodes, self.graph_tokens)
        for shape in self.shapes:
            each = work_seconds(shape, self.constants, self.bandwidth, work, padding)
            found = dict(zip(PARTS, each, strict=True))
            found["experts"] *= self._skew(shape)
            for axis in shape.axes:
                found[axis.axis] = axis_seconds(axis, self.constants, work, padding)
            busy = sum(found.values())
            if work.prefill_tokens:
                found["overhead"] += not_shorter(
                    busy, launch_seconds(shape, self.constants), work, self.graph_tokens
                ) - busy
            for part, seconds in found.items():
                total[part] = total.get(part, 0.0) + seconds
        return {part: seconds for part, seconds in total.items() if seconds}

    def handoff_seconds(self, num_tokens: int) -> float:
        """All ranks of the pool send their share at once over the link between nodes (or the fastest inside one)."""
        return self.handoff_latency_s + num_tokens * self.handoff_token_s
