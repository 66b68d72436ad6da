"""What the rooms of the planner agree on: a step as sums, what it costs, and how an engine is set.

A step of one replica is counted, never listed: the simulator, the closed-loop estimate and the advice ask the cost of
millions of them. No clock, no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

POLICIES = ("labkit", "vllm")


@dataclass(slots=True)
class StepWork:
    """One step of one replica, summed over its sequences. Nobody changes one; a frozen one takes several times as long
    to make, and a simulator makes millions."""

    prefill_tokens: int = 0
    """New prompt tokens of all chunks."""
    prefill_seqs: int = 0
    prefill_pairs: int = 0
    """(query, key) pairs that full causal attention of the chunks looks at."""
    prefill_window_pairs: int = 0
    """The same for layers with a sliding window; equal to `prefill_pairs` in a model without one."""
    prefill_context: int = 0
    """Tokens that the chunks find in the cache: their keys and values are read."""
    decodes: int = 0
    decode_context: int = 0
    """Tokens in the cache of all decodes together, the new one counted."""
    decode_window_context: int = 0
    """The same, each sequence cut at the model's window; equal to `decode_context` without one."""
    logits: int = 0
    """Rows that get logits: the decodes and the prompts that end here."""
    shared_rows: float = 0.0
    """Rows of a replica on average, over all that share experts and step together, padding counted; 0: as many as here
    on each."""


class StepCost(Protocol):
    """Seconds of a step. With `decodes` fixed and no prefill both are affine in the contexts (up to the kink of a
    roofline), so that the simulator may take a run of decode steps as first + last, halved, times their number."""

    def seconds(self, work: StepWork) -> float:
        """From the plan to the token ids, through all stages, nothing else on the way."""

    def interval(self, work: StepWork) -> float:
        """Until the next step of the replica may follow it: the slowest stage's time. Equal to `seconds` at pp 1."""

    def parts(self, work: StepWork) -> dict[str, float]:
        """Seconds by part (matrices, attention, kv, communication by axis, overhead …); they add up to `seconds`."""

    def shared_rows(self, rows: Sequence[float]) -> float:
        """`StepWork.shared_rows` of replicas that step together, by their new tokens."""

    def handoff_seconds(self, num_tokens: int) -> float:
        """To move the KV of `num_tokens` from a prefill pool to a decode pool."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How a serving engine is set, in vLLM's words and with its defaults."""

    policy: str = "vllm"
    """Admission: `vllm` reserves nothing and preempts, `labkit` reserves for the expected length."""
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    """None: the model's own."""
    kv_cache_dtype: str = "auto"
    """auto: as the weights compute; fp8: one byte."""
    enable_prefix_caching: bool = True
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"Policy {self.policy!r} is unknown: choose one of {', '.join(POLICIES)}.")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}: a share of memory, above 0 and at most 1."
            )
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}: tokens in a KV block, at least 1 (vLLM's is 16).")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(
                f"max_model_len is {self.max_model_len}: tokens of prompt and answer, at least 2, or not given."
            )
        if not 1 <= self.max_num_seqs <= self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} must be at least max_num_seqs "
                f"{self.max_num_seqs}, and that at least 1."
            )
