"""Prompts are token ids, unique per run unless sharing is the subject: a prefix cache that is warm from an
earlier run would make TTFT look tens of times too good.

Ids come from a generator seeded with (seed, run id); lengths and arrivals do not depend on the run id, so
that two runs with one seed ask for the same work in different words. Ids keep clear of both ends of the
vocabulary, where special tokens and padding live.
"""

from __future__ import annotations

import functools
import hashlib
import random

import numpy as np

MIN_VOCAB = 64
SMALL_ENGINES_IDS = 10_001
"""The published 256-prompt set draws its ids from 0..10000."""


def salt_of(seed: int, run_id: str) -> int:
    """A 64-bit seed for the ids of one run; the run id "" stands for no run in particular."""
    digest = hashlib.blake2b(f"{seed}/{run_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class PromptMaker:
    """Makes the ids of one run's prompts. Raises ValueError when the vocabulary is too small."""

    def __init__(self, vocab_size: int, seed: int, run_id: str = "") -> None:
        if vocab_size < MIN_VOCAB:
            raise ValueError(f"prompts need a vocabulary of at least {MIN_VOCAB} tokens; got {vocab_size}.")
        self.salt = salt_of(seed, run_id)
        self.vocab_size = vocab_size
        self.low, self.high = vocab_size // 32, vocab_size - vocab_size // 32
        self._rng = np.random.default_rng([self.salt, 0])
        self.block = functools.lru_cache(maxsize=4096)(self._block)

    def unique(self, num_tokens: int) -> np.ndarray:
        """int32 [num_tokens], fresh on every call."""
        return self._rng.integers(self.low, self.high, num_tokens, dtype=np.int32)

    def among(self, token_ids: tuple[int, ...], num_tokens: int) -> np.ndarray:
        """int32 [num_tokens], fresh on every call, of these ids alone. ValueError when the vocabulary lacks one."""
        if max(token_ids) >= self.vocab_size:
            raise ValueError(
                f"the workload's prompts are made of given token ids, up to {max(token_ids)}, and this model's "
                f"vocabulary ends at {self.vocab_size - 1}; choose a model that has them."
            )
        return self._rng.choice(np.array(token_ids, dtype=np.int32), num_tokens)

    def _block(self, block_id: int, num_tokens: int) -> np.ndarray:
        """int32 [num_tokens]: equal ids give equal tokens within the run."""
        rng = np.random.default_rng([self.salt, 1, block_id])
        return rng.integers(self.low, self.high, num_tokens, dtype=np.int32)

    def from_blocks(self, block_ids: tuple[int, ...], block_tokens: int, num_tokens: int) -> np.ndarray:
        """int32 [num_tokens]: the named blocks in order, cut at the end; what they leave open is unique."""
        num_needed = -(-num_tokens // block_tokens)
        pieces = [self.block(block_id, block_tokens) for block_id in block_ids[:num_needed]]
        missing = num_tokens - block_tokens * len(pieces)
        if missing > 0:
            pieces.append(self.unique(missing))
        return np.concatenate(pieces)[:num_tokens]

    def moved(self, ids: np.ndarray, num_ids: int) -> np.ndarray:
        """`ids` of 0..num_ids-1 moved into this vocabulary, shifted by the run's salt: no two runs alike."""
        return (self.low + (ids + self.salt % num_ids) % (self.high - self.low)).astype(np.int32)


def small_engines_set(num_requests: int, seed: int) -> list[tuple[np.ndarray, int]]:
    """[(ids, output tokens)]: the set that small engines publish, drawn in its published order.

    For each prompt a length of 100..1024, then its ids of 0..10000; after all prompts, the answers' lengths
    of 100..1024; Python's own generator, seed 0: 256 requests with 142,827 tokens in and 133,966 out.
    """
    draw = random.Random(seed).randint
    prompts = [[draw(0, SMALL_ENGINES_IDS - 1) for _ in range(draw(100, 1024))] for _ in range(num_requests)]
    return [(np.array(ids, dtype=np.int64), draw(100, 1024)) for ids in prompts]
