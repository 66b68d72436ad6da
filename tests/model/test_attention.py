"""Attention over pages equals attention over one piece, whatever the lengths, chunks, windows and heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from labkit.model.attention import Batch, Chunk, Decodes, attend, chunk_mask, decode_mask
from labkit.model.kv_cache import KVCache

CPU, BLOCK, HEADS, KV_HEADS, DIM = torch.device("cpu"), 4, 6, 2, 8


def plain_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """q [T, H, D] at the last T of L positions, k and v [L, K, D] → [T, H·D]; written out, query by query."""
    rows, offset = [], len(k) - len(q)
    for t in range(len(q)):
        seen = slice(max(0, offset + t + 1 - (window or len(k))), offset + t + 1)
        for h in range(HEADS):
            keys, values = k[seen, h // (HEADS // KV_HEADS)], v[seen, h // (HEADS // KV_HEADS)]
            rows.append(torch.softmax(keys @ q[t, h] / DIM**0.5, 0) @ values)
    return torch.stack(rows).view(len(q), -1)


class Pages:
    """Sequences with random queries, keys and values, of which some positions are cached already."""

    def __init__(self, lengths: list[int], window: int | None) -> None:
        generator = torch.Generator().manual_seed(len(lengths))
        self.window = window
        self.cache = KVCache(1, 64, KV_HEADS, DIM, BLOCK, torch.float32, CPU)
        blocks = torch.randperm(64, generator=generator)
        self.q = [torch.randn(n, HEADS, DIM, generator=generator) for n in lengths]
        self.kv = [torch.randn(n, 2 * KV_HEADS, DIM, generator=generator) for n in lengths]
        counts = [-(-n // BLOCK) for n in lengths]
        self.tables = list(blocks[: sum(counts)].split(counts))

    def slots(self, seq: int, start: int, stop: int) -> Tensor:
        at = torch.arange(start, stop)
        return self.tables[seq][at // BLOCK] * BLOCK + at % BLOCK

    def fill(self, seq: int, count: int) -> None:
        self.cache.write(0, self.kv[seq][:count], self.slots(seq, 0, count))

    def chunk(self, seq: int, start_row: int, context: int) -> Chunk:
        tokens = len(self.q[seq]) - context
        masks = {self.window: chunk_mask(tokens, context, self.window, CPU)}
        return Chunk(start_row, start_row + tokens, context, self.tables[seq], masks)

    def decodes(self, seqs: list[int], rows: list[int] | None = None) -> Decodes:
        """rows: which of the step's decodes they are; None: all of them."""
        width = max(len(self.tables[s]) for s in seqs)
        padded = [torch.nn.functional.pad(self.tables[s], (0, width - len(self.tables[s])), value=64) for s in seqs]
        last = torch.tensor([len(self.q[s]) - 1 for s in seqs])
        masks = {self.window: decode_mask(last, width * BLOCK, self.window, torch.float32)}
        return Decodes(len(seqs), None if rows is None else torch.tensor(rows), torch.cat(padded), masks)

    def want(self, seq: int, context: int) -> Tensor:
        k, v = self.kv[seq][:, :KV_HEADS], self.kv[seq][:, KV_HEADS:]
        return plain_attention(self.q[seq][context:], k, v, self.window)


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("split", [False, True])
def test_chunks_and_decodes_of_one_step_see_exactly_their_own_past(window: int | None, split: bool) -> None:
    lengths = [9, 12, 1, BLOCK, BLOCK + 1, 17]
    contexts = [0, 5, 0, BLOCK - 1, BLOCK, 16]
    pages = Pages(lengths, window)
    for seq, context in enumerate(contexts):
        pages.fill(seq, context)
    chunks = [pages.chunk(0, 0, 0), pages.chunk(1, 9, 5), pages.chunk(2, 16, 0)]
    new = list(zip(range(6), contexts, lengths, strict=True))
    batch = Batch(
        token_ids=torch.empty(0),
        positions=torch.empty(0),
        slots=torch.cat([pages.slots(*span) for span in new]),
        chunks=chunks,
        decodes=[pages.decodes([3], [0]), pages.decodes([5, 4], [2, 1])] if split else [pages.decodes([3, 4, 5])],
        logit_rows=None,
    )
    queries = torch.cat([pages.q[seq][context:] for seq, context, _ in new])
    keys_values = torch.cat([pages.kv[seq][context:] for seq, context, _ in new])
    got = attend(pages.cache, 0, window, queries, keys_values, batch)
    want = torch.cat([pages.want(seq, context) for seq, context, _ in new])
    assert torch.allclose(got, want, atol=1e-5)


def test_what_lies_in_other_blocks_does_not_matter() -> None:
    pages = Pages([7], None)
    pages.fill(0, 6)
    others = [block for block in range(64) if block not in pages.tables[0].tolist()]
    results = []
    for filler in (0.0, 1e6):
        pages.cache._by_block[0][:, others] = filler
        batch = Batch(torch.empty(0), torch.empty(0), pages.slots(0, 6, 7), [], [pages.decodes([0])], None)
        results.append(attend(pages.cache, 0, None, pages.q[0][6:], pages.kv[0][6:], batch))
    assert torch.equal(*results)


def test_a_new_cache_is_finite_everywhere_and_a_block_larger_than_asked() -> None:
    cache = KVCache(2, 3, KV_HEADS, DIM, BLOCK, torch.bfloat16, CPU)
    assert not cache.memory.any() and cache.spare_block == 3
    assert cache.num_bytes == 2 * 2 * KV_HEADS * 4 * BLOCK * DIM * 2
