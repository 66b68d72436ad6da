"""How one replica's scheduler is set."""

from __future__ import annotations

from dataclasses import dataclass

ADMISSIONS = ("labkit", "vllm")


@dataclass(frozen=True)
class SchedulerConfig:
    max_context: int
    eos_ids: frozenset[int] = frozenset()
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    admission: str = "labkit"
    max_in_flight: int = 1
    """Steps on their way at once (the number of pipeline stages)."""
    prefills_only: bool = False
    """Requests leave with their first token, and decode in another pool."""

    def __post_init__(self) -> None:
        if self.admission not in ADMISSIONS:
            raise ValueError(
                f"Admission {self.admission!r} is unknown: choose one of {', '.join(ADMISSIONS)}."
            )
        if self.max_in_flight < 1 or not 1 <= self.max_num_seqs <= self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} must be at least max_num_seqs "
                f"{self.max_num_seqs} (each sequence's next token fits a step), and that and max_in_flight "
                f"{self.max_in_flight} at least 1."
            )
