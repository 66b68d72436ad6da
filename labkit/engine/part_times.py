"""What each part of a model takes on a rank, measured in line: embedding, every layer, head.

A part timed alone, again and again, finds its weights in the processor's cache; in a step it never does. So
whole forward passes are run, with an instant noted between the parts, and each part's figure is its median
over the passes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from labkit.engine.batches import Shape, build, windows_of
from labkit.engine.messages import SampleSpec, Step
from labkit.engine.runner import DTYPES
from labkit.engine.sampler import sample
from labkit.layout import Layout, weight_slices
from labkit.layout.balance import ModelProfile, PartCost
from labkit.model.attention import Batch
from labkit.model.checkpoint import Weights, open_source
from labkit.model.decoder import Decoder, Layer
from labkit.model.kv_cache import KVCache, block_bytes
from labkit.model.rope import rotation_table
from labkit.model.spec import ModelSpec, load_spec, model_dir
from labkit.parallel.mesh import single_rank_mesh

BLOCK_SIZE = 16


@dataclass(frozen=True)
class StepKind:
    """The step to measure: decodes with so much context, or (prefill_tokens) one prompt instead."""

    num_seqs: int = 8
    context: int = 128
    prefill_tokens: int = 0

    def __str__(self) -> str:
        if self.prefill_tokens:
            return f"a prompt of {self.prefill_tokens} tokens"
        return f"{self.num_seqs} decodes at context {self.context}"

    @property
    def num_blocks(self) -> int:
        return self.table_len * (1 if self.prefill_tokens else self.num_seqs)

    @property
    def table_len(self) -> int:
        return -(-(self.prefill_tokens or self.context + 1) // BLOCK_SIZE)

    def message(self) -> Step:
        """Sequence s holds blocks [s · table_len, (s + 1) · table_len); token ids do not matter for time."""
        count = 1 if self.prefill_tokens else self.num_seqs
        length, context = (self.prefill_tokens, 0) if self.prefill_tokens else (1, self.context)
        specs = [SampleSpec(index) for index in range(count)]
        tokens, lengths, contexts = [0] * count * length, [length] * count, [context] * count
        ids, queries, before, tables = (
            np.array(values, "<i4").tobytes() for values in (tokens, lengths, contexts, range(self.num_blocks))
        )
        return Step(1, 0, ids, queries, before, tables, specs, count if self.prefill_tokens else 0)


def measure_parts(
    model: str, kind: StepKind | None = None, *, dtype: str = "float32", seed: int = 0, num_passes: int = 30,
    kv_tokens: int = 0, device: torch.device | None = None,
) -> ModelProfile:  # fmt: skip
    """A profile of the whole model on this process's one rank, for `balance_stages`.

    kv_tokens: tokens of KV cache that each layer is to hold, counted with its weights. Times are medians of
    `num_passes` after a fifth as many to warm up; on CUDA each part is waited for.
    """
    kind, place = kind or StepKind(), device or torch.device("cpu")
    spec = load_spec(model)
    with torch.inference_mode():
        decoder = whole_decoder(model, spec, DTYPES[dtype], place, seed)
        run = _Passes(decoder, spec, kind, DTYPES[dtype], place)
        times = np.array([run.once() for _ in range(num_passes + num_passes // 5)])[num_passes // 5 :]
    medians = np.median(times, axis=0).tolist()
    weights = [_embedding_bytes(decoder), *map(_layer_bytes, decoder.layers), _head_bytes(decoder)]
    kv = block_bytes(1, decoder.num_kv_heads, spec.head_dim, 1, DTYPES[dtype]) * kv_tokens
    embedding, *layers, head = [PartCost(*cost) for cost in zip(medians, weights, strict=True)]
    layers = [PartCost(layer.seconds, layer.num_bytes + kv) for layer in layers]
    return ModelProfile(embedding, tuple(layers), head, f"{spec.name}, {place}, {dtype}, {kind}")


def whole_decoder(model: str, spec: ModelSpec, dtype: torch.dtype, device: torch.device, seed: int) -> Decoder:
    source, layout = open_source(model_dir(model), spec, seed), Layout()
    weights = Weights(source, weight_slices(layout, spec, 0), dtype, device)
    return Decoder(spec, layout, 0, weights, single_rank_mesh(recording=False).tp)


class _Passes:
    """Forward passes of one step, each giving the seconds of every part, in order."""

    def __init__(
        self, decoder: Decoder, spec: ModelSpec, kind: StepKind, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.decoder, self.device = decoder, device
        self.message = kind.message()
        self.cache = KVCache(
            len(decoder.layers), kind.num_blocks, decoder.num_kv_heads, spec.head_dim, BLOCK_SIZE, dtype, device
        )
        windows = windows_of(spec.window(layer.index) for layer in decoder.layers)
        self.batch: Batch = build(self.message, Shape(BLOCK_SIZE, kind.num_blocks, windows, dtype, device))
        table = rotation_table(spec.rope, spec.head_dim, kind.table_len * BLOCK_SIZE, device)
        self.turns = table.index_select(0, self.batch.positions).unsqueeze(1)

    def once(self) -> list[float]:
        decoder, batch, instants = self.decoder, self.batch, [self._now()]
        x = decoder.begin(batch, None)
        instants.append(self._now())
        for slot in range(len(decoder.layers)):
            x = decoder.run_layer(slot, x, batch, self.cache, self.turns)
            instants.append(self._now())
        logits = decoder.end(x, batch)
        assert logits is not None
        sample(logits, self.message.sample)
        instants.append(self._now())
        return np.diff(instants).tolist()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _embedding_bytes(decoder: Decoder) -> int:
    assert decoder.embedding is not None
    return decoder.embedding.rows.nbytes


def _layer_bytes(layer: Layer) -> int:
    norms = layer.before_attention.weight.nbytes + layer.before_mlp.weight.nbytes
    return layer.attention.num_bytes + sum(layer.mlp.bytes_by_part().values()) + norms


def _head_bytes(decoder: Decoder) -> int:
    """A stage of its own has the head's rows even where they are the embedding's."""
    assert decoder.head is not None and decoder.norm is not None
    return decoder.head.linear.num_bytes + decoder.norm.weight.nbytes
