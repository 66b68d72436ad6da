"""Expert parallelism: whole experts on ranks, tokens on the way to them and back.

Two exchanges a layer, both all-to-all with sizes that the data decides. Dispatch: each rank sorts its rows by
the owner of their expert and sends them; a row carries its expert's number in one more column, so nothing has
to be agreed on first. Combine: the outputs go back in the order in which their rows came. Every member enters
both, with no rows if need be. An expert with copies on several ranks is asked in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from labkit.layout import (
    LayerPlacements,
    Layout,
    Placement,
    check_placement,
    plain_placement,
)
from labkit.layout.slices import rank_experts
from labkit.measure.experts import NUM_FIELDS, TIME_NS, pack_rows
from labkit.model.moe import ExpertParallel, Rows, count_rows
from labkit.model.spec import ModelSpec

if TYPE_CHECKING:
    from labkit.parallel.comm import Group
    from labkit.parallel.mesh import Mesh

Compute = Callable[[Tensor, Tensor, int], Tensor]
"""(rows in the order of experts, their experts, bytes that this rank sends to others) → their outputs."""


class Exchange:
    """One layer's experts over the ranks of an ep group. Raises LayoutError when an expert has no owner."""

    def __init__(self, group: Group, placement: Placement, num_experts: int, device: torch.device) -> None:
        check_placement(placement, num_experts, group.size)
        self.group, self.num_experts = group, num_experts
        owners = [[r for r in range(group.size) if e in placement[r]] for e in range(num_experts)]
        self._is_plain = placement == plain_placement(num_experts, group.size)
        most = max(map(len, owners))
        table = [[of[i % len(of)] for i in range(most)] for of in owners]
        self._owners = torch.tensor([*table, [-1] * most], device=device)
        """[experts + 1, most copies]: the last row is for numbers that are no expert."""
        self._num_copies = torch.tensor([*map(len, owners), 1], device=device)

    def __call__(self, rows: Tensor, experts: Tensor, compute: Compute) -> Tensor:
        """rows [N, H] in the order of `experts` int64 [N] → their experts' outputs [N, H], in the same order.

        Raises ValueError, naming it, for an expert that no rank owns.
        """
        owners = self._owners_of(experts)
        counts = self._counts(owners, experts)
        order = None if self._is_plain else torch.argsort(owners, stable=True)
        labelled = torch.cat([rows, _as_label(experts, rows.dtype)], dim=1)
        arrived = self.group.all_to_all((labelled if order is None else labelled[order]).split(counts))
        answers = self._answers(arrived, counts, compute)
        out = torch.cat(self.group.all_to_all(answers))
        return out if order is None else torch.empty_like(out).index_copy_(0, order, out)

    def _owners_of(self, experts: Tensor) -> Tensor:
        known = torch.where((experts < 0) | (experts >= self.num_experts), self.num_experts, experts)
        if self._owners.shape[1] == 1:
            return self._owners[:, 0].index_select(0, known)
        counts = count_rows(known, self.num_experts + 1)
        starts = torch.cumsum(counts, 0) - counts
        turn = torch.arange(len(known), device=known.device) - starts[known] + self.group.rank
        return self._owners[known, turn % self._num_copies[known]]

    def _counts(self, owners: Tensor, experts: Tensor) -> list[int]:
        """Rows for each rank."""
        nobody, *counts = count_rows(owners + 1, self.group.size + 1).tolist()
        if nobody:
            expert = int(experts[owners < 0][0])
            raise ValueError(
                f"a token was routed to expert {expert}, which no rank owns: the layer has experts 0 to "
                f"{self.num_experts - 1}, and its placement gives each of them a rank"
            )
        return counts

    def _answers(self, arrived: list[Tensor], counts: list[int], compute: Compute) -> list[Tensor]:
        """Outputs for what came, in parts for whom it came from."""
        sizes = [len(part) for part in arrived]
        came = torch.cat(arrived)
        rows, experts = came[:, :-1], _from_label(came[:, -1])
        order = torch.argsort(experts, stable=True)
        out = compute(rows.index_select(0, order), experts[order], self._sent_bytes(came, counts, sizes))
        return list(torch.empty_like(out).index_copy_(0, order, out).split(sizes))

    def _sent_bytes(self, came: Tensor, counts: list[int], sizes: list[int]) -> int:
        """Bytes to other ranks: rows with their label there, outputs back."""
        me, width = self.group.rank, came.shape[1]
        there, back = sum(counts) - counts[me], sum(sizes) - sizes[me]
        return (there * width + back * (width - 1)) * came.element_size()


def _label_type(dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype.itemsize == 4 else torch.int16


def _as_label(experts: Tensor, dtype: torch.dtype) -> Tensor:
    """[N] → [N, 1] of `dtype` with the integers' bits: it is moved, never calculated with."""
    return experts.to(_label_type(dtype)).view(dtype).unsqueeze(1)


def _from_label(column: Tensor) -> Tensor:
    return column.contiguous().view(_label_type(column.dtype)).long()


Instant = int | torch.cuda.Event


class ExpertMeter:
    """What the experts of this rank did since the last drain (`labkit.measure.experts` names the columns)."""

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self._is_cuda, self._nothing = device.type == "cuda", [0] * num_experts
        self.num_own_tokens: int | None = None
        """A decode is computed on every pcp rank, and counted on the first."""
        self._notes: list[tuple[list[int], Tensor | None, Instant, Instant]] = []

    def now(self) -> Instant:
        """The host's clock, or on CUDA an event that is read after the step."""
        if not self._is_cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        if not torch.cuda.is_current_stream_capturing():
            event.record()
        return event

    def note(self, layer: int, routed: Rows | None, num_rows: int, sent_bytes: int, began: Instant) -> None:
        """routed: the tokens that this rank chose experts for; None when a neighbour counts them. A step that is
        being captured into a graph leaves nothing.
        """
        if self._is_cuda and torch.cuda.is_current_stream_capturing():
            return
        fields = [layer, num_rows, sent_bytes, routed.num_dropped - routed.num_told_elsewhere if routed else 0, 0]
        self._notes.append((fields, routed.counts if routed else None, began, self.now()))

    def drain(self) -> bytes:
        """Rows since the last drain. On CUDA it waits for the device: call it after the step."""
        notes, self._notes = self._notes, []
        return pack_rows([self._row(*note) for note in notes])

    def _row(self, fields: list[int], counts: Tensor | None, began: Instant, ended: Instant) -> list[int]:
        assert len(fields) == NUM_FIELDS
        fields[TIME_NS] = _elapsed_ns(began, ended)
        return fields + (self._nothing if counts is None else counts.tolist())


def _elapsed_ns(began: Instant, ended: Instant) -> int:
    if isinstance(began, int) and isinstance(ended, int):
        return ended - began
    assert isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event)
    ended.synchronize()
    return int(began.elapsed_time(ended) * 1e6)


def expert_parallel(
    layout: Layout, spec: ModelSpec, mesh: Mesh, device: torch.device, *,
    placements: LayerPlacements = (), capacity: float = 0.0,
) -> ExpertParallel | None:  # fmt: skip
    """What the MoE layers of this rank need; None for a dense model. The meter goes on the mesh's door."""
    mesh.door.experts = None
    if spec.moe is None:
        return None
    num_experts = spec.moe.num_experts
    moe_layers = [layer for layer in range(spec.num_layers) if spec.is_moe_layer(layer)]
    meter = mesh.door.experts = ExpertMeter(num_experts, device) if mesh.door.recording else None
    if layout.ep == 1:
        return ExpertParallel({}, dict.fromkeys(moe_layers, tuple(range(num_experts))), capacity, meter)
    plain = plain_placement(num_experts, layout.ep)
    placed = {layer: (placements[layer] if layer < len(placements) else ()) or plain for layer in moe_layers}
    exchanges = {layer: Exchange(mesh.ep, placed[layer], num_experts, device) for layer in moe_layers}
    owned = {layer: tuple(rank_experts(layout, spec, mesh.rank, layer, placements)) for layer in moe_layers}
    return ExpertParallel(exchanges, owned, capacity, meter)
