"""A mixture of experts in place of an MLP: a router picks top_k of many small MLPs for each token, and their
outputs are added by its weights.

Rows (a token for one of its experts) are put in the order of experts, so that each expert is one product over
its rows. Without expert parallelism a rank holds its tp cut of every expert, and one sum over the ranks
completes routed and shared experts together. With it a rank holds whole experts: the tokens that the tp ranks
have in common are shared out, rows travel to their experts' owners and back (`labkit.parallel.expert`), and
the outputs are gathered. Shapes: T tokens, H hidden size, E experts, N = T · top_k rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.model.checkpoint import Weights
from labkit.model.experts import Experts, make_experts
from labkit.model.linear import Linear
from labkit.model.spec import ModelSpec
from labkit.model.tensors import expert_tensors

if TYPE_CHECKING:
    from labkit.parallel.expert import Exchange, ExpertMeter
    from labkit.parallel.sequence import ResidualStream


class Router:
    """Scores in the model's dtype, probabilities and weights in float32."""

    def __init__(self, weight: Tensor, top_k: int, norm_top_k: bool) -> None:
        self.weight, self.top_k, self.norm_top_k = weight, top_k, norm_top_k

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] → weights float32 [T, top_k] and experts int64 [T, top_k], best first."""
        scores = torch.softmax(F.linear(x, self.weight).float(), dim=-1)
        weights, experts = torch.topk(scores, self.top_k, dim=-1)
        if self.norm_top_k:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, experts


class Rows(NamedTuple):
    """Rows in the order of their experts. `order` [N]: where each stood in token order, expert by expert."""

    order: Tensor
    experts: Tensor
    """int64 [N], ascending."""
    counts: Tensor
    """int64 [E]: rows of each expert, those that were dropped included; what is told of the step."""
    num_dropped: int = 0
    slots: Tensor | None = None
    """int64 [N]: places in a buffer of `most` rows for each expert, when capacity is limited."""
    num_told_elsewhere: int = 0
    """Of the dropped rows, those that another rank, which computes the same tokens, tells."""

    def unsorted(self, out: Tensor) -> Tensor:
        """`out` [N, H] back in token order; what was dropped is 0."""
        shape = (len(self.order) + self.num_dropped, out.shape[1])
        whole = out.new_zeros(shape) if self.num_dropped else out.new_empty(shape)
        return whole.index_copy_(0, self.order, out)


def count_rows(experts: Tensor, num_experts: int) -> Tensor:
    """int64 [E]; without the wait for the device that bincount means on CUDA."""
    counts = torch.zeros(num_experts, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(0, experts, torch.ones_like(experts))


def sort_rows(experts: Tensor, num_experts: int, most: int = 0) -> Rows:
    """experts [N] in token order; most: rows that an expert takes, the earliest ones (0: all of them)."""
    order = torch.argsort(experts, stable=True)
    ordered, counts = experts[order], count_rows(experts, num_experts)
    if not most:
        return Rows(order, ordered, counts)
    starts = torch.cumsum(counts, 0) - counts
    place = torch.arange(len(order), device=order.device) - starts[ordered]
    kept = place < most
    order, ordered, slots = order[kept], ordered[kept], (ordered * most + place)[kept]
    return Rows(order, ordered, counts, len(kept) - len(order), slots)


def capacity_of(factor: float, num_tokens: int, top_k: int, num_experts: int) -> int:
    """Rows that one expert takes of `num_tokens`: `factor` times an even share, rounded up; 0: no limit.

    As in GShard (Lepikhin et al. 2020), for the tokens of one rank.
    """
    return -int(-factor * num_tokens * top_k // num_experts)


@dataclass(frozen=True)
class ExpertParallel:
    """What a rank's MoE layers need of the layout: set by the runner."""

    exchanges: dict[int, Exchange]
    """By layer; empty when experts are cut by tp (ep 1)."""
    owned: dict[int, tuple[int, ...]]
    """By layer: the experts whose weights this rank has."""
    capacity: float = 0.0
    """Rows an expert takes, as a multiple of an even share; 0: all."""
    meter: ExpertMeter | None = None


class MoeMlp:
    """A layer's router, its experts on this rank, and the shared expert where the family has one."""

    def __init__(
        self, layer: int, spec: ModelSpec, weights: Weights, stream: ResidualStream, parallel: ExpertParallel
    ) -> None:
        assert spec.moe is not None
        moe, mixtral = spec.moe, spec.family == "mixtral"
        prefix = f"model.layers.{layer}.{'block_sparse_moe' if mixtral else 'mlp'}"
        self.layer, self.num_experts, self.top_k, self.stream = layer, moe.num_experts, moe.top_k, stream
        self.router = Router(weights[f"{prefix}.gate.weight"], moe.top_k, moe.norm_top_k)
        owned, self.exchange = parallel.owned[layer], parallel.exchanges.get(layer)
        self.mine = torch.tensor(owned, device=weights.device) if self.exchange is not None else None
        self.experts: Experts = make_experts(weights, [_names(layer, spec, e) for e in owned])
        self.shared = SharedExpert(prefix, weights) if moe.shared_intermediate_size else None
        self.capacity, self.meter = parallel.capacity, parallel.meter

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """x [T, H] (normed) → residual + the experts' sum; both as the stream holds them."""
        stream = self.stream
        if self.exchange is None:
            x = stream.whole(x)
            total = self._routed(x)
            if self.shared is not None:
                total = total + self.shared(x)
            return stream.summed(total).add_(residual)
        # the tp ranks have the same tokens, or a share of them each: each sends a share through the experts
        total = stream.rejoined(self._routed(stream.share(x), stream.first_of_share))
        if self.shared is not None:
            total = total + stream.summed(self.shared(stream.whole(x)))
        return total + residual

    def take_part(self, x: Tensor) -> None:
        """In the exchanges of other ranks' tokens, with none of its own: x [0, H]."""
        if self.exchange is not None:
            self._routed(x)

    def _routed(self, x: Tensor, first: int = 0) -> Tensor:
        """[T, H] → Σ over a token's experts of weight · expert(token); with tp-cut experts this rank's part.

        first: the place of x[0] among the step's tokens.
        """
        weights, experts = self.router(x)
        most = capacity_of(self.capacity, len(x), self.top_k, self.num_experts)
        rows = sort_rows(experts.flatten(), self.num_experts, most)
        if self.meter is not None and self.meter.num_own_tokens is not None:
            rows = told_of_first(rows, experts[: max(0, self.meter.num_own_tokens - first)], self.num_experts)
        given = x.index_select(0, rows.order // self.top_k)
        out = self._served(given, rows) if rows.slots is None else self._served_padded(given, rows, rows.slots, most)
        outs = rows.unsorted(out).view(len(x), self.top_k, x.shape[1])
        return (outs * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def _served_padded(self, given: Tensor, rows: Rows, slots: Tensor, most: int) -> Tensor:
        """With a capacity every expert is sent `most` rows, zeros where there are fewer: sizes known beforehand."""
        buffer = given.new_zeros(self.num_experts * most, given.shape[1]).index_copy_(0, slots, given)
        experts = torch.arange(self.num_experts, device=given.device).repeat_interleave(most)
        return self._served(buffer, rows._replace(experts=experts)).index_select(0, slots)

    def _served(self, given: Tensor, rows: Rows) -> Tensor:
        """given [n, H] in the order of `rows.experts` → what those experts make of them, in the same order."""
        if self.exchange is None:
            return self._compute(given, rows.experts, 0, rows)
        return self.exchange(given, rows.experts, lambda g, experts, sent: self._compute(g, experts, sent, rows))

    def _compute(self, given: Tensor, experts: Tensor, sent_bytes: int, rows: Rows) -> Tensor:
        """given [n, H] in the order of `experts` [n], all of them this rank's; measured where it is recorded."""
        counts = count_rows(experts, self.num_experts)
        mine = counts if self.mine is None else counts.index_select(0, self.mine)
        if self.meter is None:
            return self.experts(given, mine)
        began = self.meter.now()
        out = self.experts(given, mine)
        told = rows if self.exchange is not None or self.stream.group.rank == 0 else None  # tp ranks route alike
        self.meter.note(self.layer, told, len(given), sent_bytes, began)
        return out

    def bytes_by_part(self) -> dict[str, int]:
        found = {"experts": self.experts.num_bytes, "router": self.router.weight.nbytes}
        if self.shared is not None:
            found["shared_experts"] = self.shared.num_bytes
            found["router"] += self.shared.gate_bytes
        return found


def told_of_first(rows: Rows, experts: Tensor, num_experts: int) -> Rows:
    """`rows`, telling of the first tokens only: experts [those tokens, top_k]."""
    num_kept = int((rows.order < experts.numel()).sum())
    told_here = experts.numel() - num_kept
    counts = count_rows(experts.flatten(), num_experts)
    return rows._replace(counts=counts, num_told_elsewhere=rows.num_dropped - told_here)


class SharedExpert:
    """The MLP that every token passes, cut by tp as any MLP; Qwen2-MoE scales it by a sigmoid gate."""

    def __init__(self, prefix: str, weights: Weights) -> None:
        name = f"{prefix}.shared_expert"
        both = [weights[f"{name}.{part}_proj.weight"] for part in ("gate", "up")]
        self.gate_up = Linear(torch.cat(both))
        self.down = Linear(weights[f"{name}.down_proj.weight"])
        self.gate = weights.get(f"{prefix}.shared_expert_gate.weight")

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] → [T, H], this rank's part of the sum over the tp group."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out = self.down(F.silu(gate) * up)
        return out if self.gate is None else torch.sigmoid(F.linear(x, self.gate)) * out

    @property
    def gate_bytes(self) -> int:
        return 0 if self.gate is None else self.gate.nbytes

    @property
    def num_bytes(self) -> int:
        return self.gate_up.num_bytes + self.down.num_bytes


def _names(layer: int, spec: ModelSpec, expert: int) -> tuple[str, str, str]:
    """The checkpoint's names of one expert's gate, up and down."""
    gate, up, down = (f"model.layers.{layer}.{tensor.name}" for tensor in expert_tensors(spec, expert))
    return gate, up, down
