"""A decoder-only transformer as one rank of a layout holds it: an ordinary model, whose parts were cut when
it was built. A pipeline stage is a stretch of it: the first begins with token ids, the last ends with logits.

Llama 3, Qwen2.5, Qwen3 and Mistral differ in what they carry (biases, per-head norms, scaling of positions),
not in how they run, so one class reads them all: what a checkpoint has is used. Heads, the MLP's inner columns
and the vocabulary are shared out over a tensor-parallel group; the stream between layers is whole on every rank of
it, or with `+sp` shared out by rows (`labkit.parallel.sequence`).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.layout import Layout, is_first_stage, is_last_stage, kv_heads, layers, query_heads, vocab_rows
from labkit.measure.recorder import phase_code
from labkit.model.attention import Batch, attend
from labkit.model.checkpoint import Weights, joined
from labkit.model.kv_cache import KVCache
from labkit.model.linear import Linear, RowParallel
from labkit.model.moe import ExpertParallel, MoeMlp
from labkit.model.norm import RmsNorm
from labkit.model.rope import pair_rows, rotate_
from labkit.model.spec import ModelSpec
from labkit.parallel.sequence import ResidualStream

if TYPE_CHECKING:
    from labkit.parallel.comm import Group


class Attention:
    """Projections of this rank's heads; queries, keys and values come out of one product."""

    def __init__(
        self, layer: int, spec: ModelSpec, weights: Weights, stream: ResidualStream, heads: tuple[int, int]
    ) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        self.stream = stream
        self.window = spec.window(layer)
        self.num_query_heads, self.num_kv_heads = heads
        self.head_dim = spec.head_dim
        names = [f"{prefix}.{part}_proj" for part in "qkv"]
        self.qkv = Linear(
            _whole(joined([self._paired(weights.get(f"{name}.weight"), name) for name in names])),
            joined([self._paired(weights.get(f"{name}.bias"), name) for name in names]),
        )
        out = f"{prefix}.o_proj"
        self.output = RowParallel(weights[f"{out}.weight"], weights.get(f"{out}.bias"), stream)
        self.head_norms = self._head_norms(prefix, spec, weights)

    def _paired(self, rows: Tensor | None, name: str) -> Tensor | None:
        return rows if rows is None or name.endswith("v_proj") else pair_rows(rows, self.head_dim)

    def _head_norms(self, prefix: str, spec: ModelSpec, weights: Weights) -> tuple[RmsNorm, RmsNorm] | None:
        """Qwen3's norms of each query and key head; their scale follows the heads' paired order."""
        if f"{prefix}.q_norm.weight" not in weights:
            return None
        q, k = (pair_rows(weights[f"{prefix}.{part}_norm.weight"], self.head_dim) for part in "qk")
        return RmsNorm(q, spec.norm_eps), RmsNorm(k, spec.norm_eps)

    def __call__(self, x: Tensor, residual: Tensor, slot: int, cache: KVCache, batch: Batch, turns: Tensor) -> Tensor:
        heads = self.qkv(self.stream.whole(x)).unflatten(-1, (-1, self.head_dim))
        num_rotated = self.num_query_heads + self.num_kv_heads
        if self.head_norms is not None:
            self._norm_heads(heads)
        rotate_(heads[:, :num_rotated], turns)
        queries, keys_values = heads[:, : self.num_query_heads], heads[:, self.num_query_heads :]
        out = attend(cache, slot, self.window, queries, keys_values, batch)
        return self.output.plus(out, residual)

    def _norm_heads(self, heads: Tensor) -> None:
        assert self.head_norms is not None
        q_norm, k_norm = self.head_norms
        queries = heads[:, : self.num_query_heads]
        keys = heads[:, self.num_query_heads : self.num_query_heads + self.num_kv_heads]
        queries.copy_(q_norm(queries))
        keys.copy_(k_norm(keys))

    @property
    def num_bytes(self) -> int:
        return self.qkv.num_bytes + self.output.num_bytes


class Mlp:
    """down(silu(gate x) · up x); gate and up are each cut, then joined, so a rank holds its share of both."""

    def __init__(self, prefix: str, weights: Weights, stream: ResidualStream) -> None:
        self.stream = stream
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self.gate_up = Linear(
            _whole(joined([weights.get(f"{name}.weight") for name in names])),
            joined([weights.get(f"{name}.bias") for name in names]),
        )
        self.down = RowParallel(weights[f"{prefix}.down_proj.weight"], weights.get(f"{prefix}.down_proj.bias"), stream)
        self.width = self.gate_up.out_features // 2

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        both = self.gate_up(self.stream.whole(x))
        return self.down.plus(F.silu(both[:, : self.width]) * both[:, self.width :], residual)

    def bytes_by_part(self) -> dict[str, int]:
        return {"mlp": self.gate_up.num_bytes + self.down.num_bytes}


class Layer:
    def __init__(
        self, index: int, spec: ModelSpec, weights: Weights, stream: ResidualStream, heads: tuple[int, int],
        moe: ExpertParallel | None = None,
    ) -> None:  # fmt: skip
        prefix = f"model.layers.{index}"
        self.index = index
        self.before_attention = RmsNorm(weights[f"{prefix}.input_layernorm.weight"], spec.norm_eps)
        self.attention = Attention(index, spec, weights, stream, heads)
        self.before_mlp = RmsNorm(weights[f"{prefix}.post_attention_layernorm.weight"], spec.norm_eps)
        self.mlp: Mlp | MoeMlp
        if spec.is_moe_layer(index):
            assert moe is not None
            self.mlp = MoeMlp(index, spec, weights, stream, moe)
        else:
            self.mlp = Mlp(f"{prefix}.mlp", weights, stream)


class Embedding:
    """This rank's rows of the vocabulary: other ranks' tokens look up as zeros, and the sum over ranks fills
    them in.
    """

    def __init__(self, rows: Tensor, first_row: int, stream: ResidualStream) -> None:
        self.rows, self.first_row, self.stream = rows, first_row, stream

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[tokens] → [tokens that the stream holds, hidden_size]."""
        if self.stream.group.size == 1:
            return F.embedding(token_ids, self.rows)
        local = token_ids - self.first_row
        elsewhere = (local < 0) | (local >= len(self.rows))
        found = F.embedding(local.masked_fill_(elsewhere, 0), self.rows)
        return self.stream.summed(found.masked_fill_(elsewhere.unsqueeze(1), 0.0))


class Head:
    """This rank's rows of the output projection; the first rank of the group gets all logits, without the
    padding.
    """

    def __init__(self, linear: Linear, vocab_size: int, group: Group) -> None:
        self.linear, self.vocab_size, self.group = linear, vocab_size, group

    def __call__(self, x: Tensor) -> Tensor | None:
        """[rows, hidden_size] → [rows, vocab_size] on group rank 0, None on the others."""
        parts = self.group.gather(self.linear(x))
        if parts is None:
            return None
        logits = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return logits[:, : self.vocab_size]

    def nothing(self, x: Tensor) -> Tensor | None:
        """The answer to no rows, without a word to other ranks: a chunk that ends no prompt has none."""
        return x.new_empty(0, self.vocab_size) if self.group.rank == 0 else None


class Decoder:
    """`spec` under `layout` as rank `rank` holds it; `forward` runs one step of its replica."""

    def __init__(
        self, spec: ModelSpec, layout: Layout, rank: int, weights: Weights, group: Group,
        moe: ExpertParallel | None = None,
    ) -> None:  # fmt: skip
        self.spec, self.door = spec, group.door
        self.stream = ResidualStream(group, layout.sp)
        self.counts_decodes = layout.coords(rank).pcp == 0
        heads = len(query_heads(layout, spec, rank)), len(kv_heads(layout, spec, rank))
        self.num_kv_heads = heads[1]
        rows = weights.get("model.embed_tokens.weight")
        self.embedding: Embedding | None = None
        if is_first_stage(layout, rank):
            self.embedding = Embedding(_whole(rows), vocab_rows(layout, spec, rank).start, self.stream)
        self.layers = [Layer(i, spec, weights, self.stream, heads, moe) for i in layers(layout, spec, rank)]
        self.norm: RmsNorm | None = None
        self.head: Head | None = None
        if is_last_stage(layout, rank):
            self.norm = RmsNorm(weights["model.norm.weight"], spec.norm_eps)
            head_rows = _whole(rows) if spec.tie_word_embeddings else weights["lm_head.weight"]
            self.head = Head(Linear(head_rows), spec.vocab_size, group)

    def forward(self, batch: Batch, cache: KVCache, turns: Tensor, hidden: Tensor | None = None) -> Tensor | None:
        """Logits [logit_rows, vocab_size] in the weights' dtype on the group's first rank; None elsewhere.

        A stage before the last gives the hidden states [tokens that the stream holds, hidden_size] for the next one
        instead.

        turns: complex64 [positions, head_dim / 2], a `rotation_table` longer than any position of the batch.
        hidden: what the stage before gave; None on the first.
        """
        self._tag(batch)
        self.stream.begin(len(batch.token_ids))
        turns = turns.index_select(0, batch.positions).unsqueeze(1)
        x = self.begin(batch, hidden)
        for slot in range(len(self.layers)):
            x = self.run_layer(slot, x, batch, cache, turns)
        self.door.layer = -1
        return x if self.head is None else self.end(x, batch)

    def begin(self, batch: Batch, hidden: Tensor | None) -> Tensor:
        if self.embedding is not None:
            return self.embedding(batch.token_ids)
        assert hidden is not None, "a stage after the first begins with the hidden states of the one before"
        return hidden

    def run_layer(self, slot: int, x: Tensor, batch: Batch, cache: KVCache, turns: Tensor) -> Tensor:
        """One layer of this stage, by its place in the cache; turns: those of the batch's positions."""
        layer = self.layers[slot]
        self.door.layer = layer.index
        if self.door.sending:
            self.door.advance()
        x = layer.attention(layer.before_attention(x), x, slot, cache, batch, turns)
        return layer.mlp(layer.before_mlp(x), x)

    def end(self, x: Tensor, batch: Batch) -> Tensor | None:
        assert self.norm is not None and self.head is not None
        rows = batch.logit_rows
        if rows is not None and not len(rows):
            return self.head.nothing(x)
        x = self.stream.whole(x)
        return self.head(self.norm(x if rows is None else x.index_select(0, rows)))

    def take_part(self, phase: int) -> Tensor | None:
        """In a step of other replicas, whose experts these ranks share: no tokens, every exchange."""
        self.door.tag(phase=phase)
        x = self.layers[0].before_mlp.weight.new_empty(0, self.spec.hidden_size)
        for layer in self.layers:
            if isinstance(layer.mlp, MoeMlp):
                self.door.layer = layer.index
                layer.mlp.take_part(x)
        self.door.layer = -1
        return None if self.head is None else self.head.nothing(x)

    def _tag(self, batch: Batch) -> None:
        self.door.tag(phase=phase_code(int(batch.has_prompts), len(batch.decodes)))
        if self.door.experts is not None and not self.counts_decodes:
            self.door.experts.num_own_tokens = batch.context.num_rows if batch.context else 0

    def bytes_by_part(self) -> dict[str, int]:
        """What the weights occupy; a tied head that had to be laid out apart from the embedding counts as
        head.
        """
        total: Counter[str] = Counter()
        if self.embedding is not None:
            total["embedding"] = self.embedding.rows.nbytes
        for layer in self.layers:
            total["attention"] += layer.attention.num_bytes
            total.update(layer.mlp.bytes_by_part())
            total["norm"] += layer.before_attention.weight.nbytes + layer.before_mlp.weight.nbytes
        if self.head is not None and self.norm is not None:
            total["norm"] += self.norm.weight.nbytes
            if self.embedding is None or self.head.linear.weight is not self.embedding.rows:
                total["head"] = self.head.linear.num_bytes
        return dict(total)


def _whole(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ValueError("a projection has no weights: its layout gives this rank none of its rows")
    return tensor
