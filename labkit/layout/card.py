"""The five questions of every axis, answered in bytes and counts for one model and one step.

What is partitioned, what stays replicated, what crosses, how often, and what it improves. The answers are
computed by comparing the layout with the same layout without that axis, so nothing in a card is typed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from labkit.layout.grammar import AXES
from labkit.layout.grid import Layout
from labkit.layout.holdings import KV
from labkit.layout.slices import is_quantised, kv_bytes_per_token, rank_memory
from labkit.layout.traffic import Crossing, StepShape, axis_traffic
from labkit.layout.work import StepWork, step_work
from labkit.model.shapes import ModelSpec
from labkit.model.tensors import EMBEDDING, EXPERTS, HEAD, ROUTER, expert_tensors

_REUSE_PARTS = {"dcp": (KV,), "ep": (EXPERTS, ROUTER)}
"""dcp and ep reuse ranks that tp has cut already; they speak of these parts only."""


_MORE_IS_BETTER = ("num_replicas", "steps_in_flight", "expert_columns")


class PartShare(NamedTuple):
    """A part's mean bytes on a rank without the axis and with it. `copies` of the axis's `degree` stay."""

    part: str
    without_bytes: int
    with_bytes: int
    copies: float


class Improvement(NamedTuple):
    """One quantity of `StepWork` without the axis and with it."""

    quantity: str
    without: int
    with_axis: int


@dataclass(frozen=True)
class AxisCard:
    """The answers for one axis of one layout, for one step of one replica."""

    axis: str
    degree: int
    partitioned: tuple[PartShare, ...]
    replicated: tuple[PartShare, ...]
    ops: tuple[Crossing, ...]
    """What crosses and how often; empty when the ranks of this axis never speak within a step."""
    improves: tuple[Improvement, ...]
    costs: tuple[Improvement, ...]
    """Quantities that the axis makes worse (a tied head's second copy, for example)."""

    @property
    def crosses(self) -> tuple[str, ...]:
        return tuple(crossing.what for crossing in self.ops)

    @property
    def wire_bytes(self) -> int:
        """Bytes that one rank sends in the step for this axis, by ring algorithms."""
        return sum(crossing.wire_bytes(self.degree) for crossing in self.ops)


def with_and_without(layout: Layout, axis: str) -> tuple[Layout, Layout]:
    """The two layouts that a card compares: the axis as it is, and the axis at degree 1.

    dcp depends on tp and pcp and has a card of its own, so their cards compare layouts without it.
    """
    if axis in _REUSE_PARTS:
        return layout, replace(layout, **{axis: 1})  # type: ignore[arg-type]  # the two axes are ints
    if axis == "pp":
        return layout, replace(layout, pp=1, split=None)
    if axis == "dp":
        return layout, replace(layout, dp=1, ep=layout.ranks_per_stage if layout.attention_dp else layout.ep)
    kept = replace(layout, dcp=1)
    bare = replace(kept, ep=1, sp=kept.sp and axis != "tp", ring=kept.ring and axis != "pcp")
    smaller = replace(bare, **{axis: 1})  # type: ignore[arg-type]
    return kept, replace(smaller, ep=_same_ep(layout, smaller))


def _same_ep(layout: Layout, smaller: Layout) -> int:
    """The degree that means in `smaller` what `layout.ep` means in `layout`: none, a stage, or all."""
    if layout.ep == 1:
        return 1
    return smaller.ranks_per_stage * (smaller.dp if layout.attention_dp else 1)


def _mean_parts(layout: Layout, spec: ModelSpec, step: StepShape, dtype_bytes: int) -> dict[str, float]:
    """Part → mean bytes on a rank, KV of the step included; a tied head's copy counts as embedding."""
    total: Counter[str] = Counter()
    for rank in range(layout.world_size):
        total.update(rank_memory(layout, spec, rank, dtype_bytes))
        total[KV] += step.kv_tokens * kv_bytes_per_token(layout, spec, rank, dtype_bytes)
    if spec.tie_word_embeddings:
        total[EMBEDDING] += total.pop(HEAD, 0)
    return {part: size / layout.world_size for part, size in total.items() if size}


def _uncut_experts(layout: Layout, spec: ModelSpec, dtype_bytes: int) -> float:
    """Mean bytes of all experts of a stage, cut by nobody: what ep starts from."""
    assert spec.moe is not None
    here = sum(
        spec.quantization.num_bytes(t.shape) if spec.quantization and is_quantised(spec, t)
        else t.num_elements * dtype_bytes
        for t in expert_tensors(spec, 0)
    )
    num_layers = sum(spec.is_moe_layer(layer) for layer in range(spec.num_layers))
    return here * spec.moe.num_experts * num_layers / layout.pp


def _shares(
    axis: str, layout: Layout, spec: ModelSpec, step: StepShape, dtype_bytes: int
) -> Iterator[PartShare]:
    kept, without = with_and_without(layout, axis)
    before = _mean_parts(without, spec, step, dtype_bytes)
    after = _mean_parts(kept, spec, step, dtype_bytes)
    if axis == "ep" and spec.moe:
        before[EXPERTS] = _uncut_experts(layout, spec, dtype_bytes)
    if axis == "dp":  # another replica's KV belongs to other requests: it is added, not copied
        before.pop(KV, None)
    degree = getattr(layout, axis)
    for part, size in before.items():
        if part in _REUSE_PARTS.get(axis, (part,)):
            yield PartShare(part, round(size), round(after[part]), round(degree * after[part] / size, 3))


def _changes(before: StepWork, after: StepWork) -> tuple[tuple[Improvement, ...], tuple[Improvement, ...]]:
    """(better, worse): less is better, except of what is listed as the other way round."""
    better: list[Improvement] = []
    worse: list[Improvement] = []
    for name, old, new in zip(StepWork._fields, before, after, strict=True):
        if old == new:
            continue
        (better if (new > old) == (name in _MORE_IS_BETTER) else worse).append(Improvement(name, old, new))
    return tuple(better), tuple(worse)


def axis_card(axis: str, layout: Layout, spec: ModelSpec, step: StepShape, dtype_bytes: int) -> AxisCard:
    """The card of one axis whose degree is above 1."""
    degree = getattr(layout, axis)
    shares = tuple(_shares(axis, layout, spec, step, dtype_bytes))
    kept, without = with_and_without(layout, axis)
    better, worse = _changes(*(step_work(each, spec, step, dtype_bytes) for each in (without, kept)))
    return AxisCard(
        axis=axis,
        degree=degree,
        partitioned=tuple(share for share in shares if share.copies < degree),
        replicated=tuple(share for share in shares if share.copies >= degree),
        ops=axis_traffic(axis, layout, spec, step, dtype_bytes),
        improves=better,
        costs=worse,
    )


def step_card(
    layout: Layout, spec: ModelSpec, step: StepShape, dtype_bytes: int | None = None
) -> list[AxisCard]:
    """A card for each axis in use, in printed order. `dtype_bytes` (weights and KV) defaults to the model's
    dtype.

    The layout must be legal for the model (`require_legal`).
    """
    size = dtype_bytes or spec.dtype_bytes
    return [axis_card(axis, layout, spec, step, size) for axis in AXES if getattr(layout, axis) > 1]
