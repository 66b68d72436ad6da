"""A rank's memory as arithmetic: budget = weights + KV + what is free; and the sentences when that does not
add up.

The budget (`memory_bytes`) bounds weights plus KV on every backend, so that a model that needs two ranks
exists on a laptop too. What the process or the device uses besides (libraries, buffers) is `other` and
outside it.
"""

from __future__ import annotations

import numpy as np
import psutil
import torch

from labkit.engine.messages import Configure, Memory, SampleSpec, Step

MIB = 1024 * 1024
CUDA_SHARE = 0.9
"""Of a GPU's free memory, what weights and KV may take when no budget is given; the rest is for activations.
"""
CPU_SHARE = 0.25
CPU_MOST_KV = 1024 * MIB
WARM_PROMPT = 8


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


def report(weights: dict[str, int], kv_bytes: int, budget: int, other: int) -> Memory:
    used = sum(weights.values())
    return Memory(used, kv_bytes, other, max(0, budget - used - kv_bytes), weights)


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


def _step(epoch: int, num_tokens: int, context: int, block: int, prefill: bool) -> Step:
    tokens, length, before, table = (
        np.array(values, dtype="<i4").tobytes() for values in ([0] * num_tokens, [num_tokens], [context], [block])
    )
    return Step(epoch, -1, tokens, length, before, table, [SampleSpec(0)], int(prefill))
