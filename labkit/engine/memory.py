"""A rank's memory as arithmetic: budget = weights + KV + what is free; and the sentences when that does not
add up.

The budget (`memory_bytes`) bounds weights plus KV on every backend, so that a model that needs two ranks
exists on a laptop too. What the process or the device uses besides (libraries, buffers) is `other` and
outside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import psutil
import torch

from labkit.engine.messages import Configure, Memory, SampleSpec, Step
from labkit.measure.memory import BESIDE

MIB = 1024 * 1024
CUDA_SHARE = 0.9
"""Of a GPU's free memory, what weights and KV may take when no budget is given; the rest is for activations.
"""
CPU_SHARE = 0.25
CPU_MOST_KV = 1024 * MIB
WARM_PROMPT = 8
_DEFAULT_POOL = (0, 0)
"""Of torch's allocator; every other one belongs to graphs."""


class DoesNotFitError(ValueError):
    """The budget does not hold the weights and one KV block; `memory` is what was needed."""

    def __init__(self, sentence: str, needed: Memory) -> None:
        super().__init__(sentence)
        self.memory = needed


def used_bytes(device: torch.device) -> int:
    """What the process (CPU) or the device (CUDA) uses now."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return psutil.Process().memory_info().rss


def default_budget(device: torch.device, num_ranks: int, weights_bytes: int) -> int:
    """Bytes for weights plus KV when none are given: most of the GPU; on a CPU a quarter of the RAM shared by
    the ranks, and at most 1 GiB beside the weights.

    A laptop's RAM is other programs' too, the pages of a cache are taken one by one as blocks are first
    used (so a large one grows for hours), and beside gigabytes of room no bar of weights and KV can be read.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * CUDA_SHARE)
    return min(weights_bytes + CPU_MOST_KV, int(psutil.virtual_memory().total * CPU_SHARE / num_ranks))


def report(
    weights: dict[str, int], kv_bytes: int, budget: int, other: int, besides: dict[str, int | None] | None = None
) -> Memory:
    used = sum(weights.values())
    return Memory(used, kv_bytes, other, max(0, budget - used - kv_bytes), weights, besides or {})


def beside(device: torch.device, weights_bytes: int, kv_bytes: int) -> dict[str, int | None]:
    """What the allocator holds besides weights and KV (`measure.memory.BESIDE`), after a full step.

    activations: the peak since `forget_peak` above what stands now; workspace: what stands beyond weights and KV;
    graphs: the pools of CUDA graphs; slack: reserved and not in use. None on a CPU: its allocator keeps no such books.
    """
    if device.type != "cuda":
        return dict.fromkeys(BESIDE)
    stats, mine = torch.cuda.memory_stats(device), torch.device(device).index or 0
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == mine]
    return allocator_parts(stats, segments, weights_bytes + kv_bytes)


def allocator_parts(stats: dict[str, int], segments: list[dict[str, Any]], standing: int) -> dict[str, int | None]:
    """From torch.cuda.memory_stats and memory_snapshot; `standing`: bytes of weights and KV."""
    graphs = [s for s in segments if tuple(s.get("segment_pool_id", _DEFAULT_POOL)) != _DEFAULT_POOL]
    in_graphs, graph_bytes = (sum(s[key] for s in graphs) for key in ("allocated_size", "total_size"))
    now, reserved = stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"]
    return {
        "activations": max(0, stats["allocated_bytes.all.peak"] - now),
        "workspace": max(0, now - in_graphs - standing),
        "graphs": graph_bytes,
        "slack": max(0, (reserved - graph_bytes) - (now - in_graphs)),
    }


def forget_peak(device: torch.device) -> None:
    """The next `beside` tells the peak from here on."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def check_weights(model: str, layout: str, rank: int, weights: dict[str, int], budget: int) -> None:
    """Raises DoesNotFitError before anything is loaded when the weights alone exceed the budget."""
    used = sum(weights.values())
    if used > budget:
        raise DoesNotFitError(
            f"{model} under {layout} puts {_mib(used)} of weights on rank {rank}, and the rank may use "
            f"{_mib(budget)}: {_mib(used - budget)} too much before any KV. Split it over more ranks (tp), "
            "or raise --memory-per-rank.",
            report(weights, 0, budget, 0),
        )


def blocks_that_fit(model: str, rank: int, weights: dict[str, int], budget: int, block: int) -> int:
    """KV blocks beside the weights, less the one that pads batches. Raises DoesNotFitError when that leaves
    none.
    """
    used = sum(weights.values())
    num_blocks = (budget - used) // block - 1
    if num_blocks < 1:
        raise DoesNotFitError(
            f"{model} on rank {rank}: {_mib(budget)} − {_mib(used)} of weights leaves {_mib(budget - used)}; "
            f"two KV blocks of {_mib(block)} (one for requests, one for padding) are the least. Split it "
            "over more ranks (tp), or raise --memory-per-rank.",
            report(weights, 0, budget, 0),
        )
    return num_blocks


def most_blocks(max_num_seqs: int, max_positions: int, block_size: int) -> int:
    """KV blocks that every sequence of a full step needs at the end of the context: more are never used at
    once.
    """
    return max_num_seqs * -(-max_positions // block_size)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f} MiB"


def warm_steps(message: Configure, block: int) -> list[Step]:
    """A prompt of a few tokens and one decode after it, all in one block."""
    length = max(1, min(WARM_PROMPT, message.block_size - 1, message.max_batched_tokens))
    prompt = _step(message.epoch, length, 0, block, True)
    return [prompt, _step(message.epoch, 1, min(length, message.block_size - 1), block, False)]


def full_step(message: Configure, block: int, block_tokens: int) -> Step:
    """A prefill of as many tokens as a step may hold (or as its sequences may bring), a block a sequence, all of them
    written to one block that nobody reads.
    """
    num_tokens = min(message.max_batched_tokens, message.max_num_seqs * block_tokens)
    num_seqs = -(-num_tokens // block_tokens)
    lengths = [block_tokens] * (num_seqs - 1) + [num_tokens - (num_seqs - 1) * block_tokens]
    sample = [SampleSpec(seq) for seq in range(num_seqs)]
    return _plan(message.epoch, lengths, [0] * num_seqs, block, sample, num_seqs)


def _step(epoch: int, num_tokens: int, context: int, block: int, prefill: bool) -> Step:
    return _plan(epoch, [num_tokens], [context], block, [SampleSpec(0)], int(prefill))


def _plan(
    epoch: int, lengths: list[int], contexts: list[int], block: int, sample: list[SampleSpec], num_prefills: int
) -> Step:
    """Zeros for tokens, one block for every sequence."""
    columns = ([0] * sum(lengths), lengths, contexts, [block] * len(lengths))
    tokens, queries, before, tables = (np.array(values, dtype="<i4").tobytes() for values in columns)
    return Step(epoch, -1, tokens, queries, before, tables, sample, num_prefills)
