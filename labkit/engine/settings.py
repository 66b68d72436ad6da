"""How the engine is set up: the layout, and everything else that is fixed while a figure is measured.

Changing any of it is a switch. `threads`, the device and the number of ranks belong to the pool and stay.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from labkit.engine.router import POLICIES
from labkit.engine.scheduler import ADMISSIONS
from labkit.layout import AnyLayout, Layout

FABRICS = ("shm", "gloo", "nccl")
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
PLACEMENTS = ("plain", "measured")
FIRST_TOKENS = ("decode", "prefill")
_CHOICES = {"router": POLICIES, "admission": ADMISSIONS, "fabric": FABRICS, "dtype": tuple(DTYPES),
            "expert_placement": PLACEMENTS, "first_token": FIRST_TOKENS}  # fmt: skip


@dataclass(frozen=True)
class EngineSettings:
    layout: AnyLayout = Layout()
    router: str = "least-work"
    admission: str = "labkit"
    prefix_cache: bool = True
    memory_per_rank: int = 0
    """Bytes of weights plus KV on each rank; 0: the device's default (`engine.memory`)."""
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    block_size: int = 16
    fabric: str = "shm"
    record: bool = True
    graphs: bool = False
    dtype: str = "float32"
    seed: int = 0
    expert_capacity: float = 0.0
    """Tokens that an expert takes of a rank in a step, as a multiple of an even share; 0: all, none dropped."""
    expert_placement: str = "plain"
    """measured: by the load of the layout that stands when this one is set up."""
    expert_copies: int = 0
    """Extra copies of the most loaded experts, in each layer, when the placement is measured."""
    first_token: str = "decode"
    """With pools for prefill and decode: which of them gives the user the first token. decode: once the KV has
    landed there, as vLLM and SGLang do; prefill: as soon as it is sampled, and the handoff delays the second."""
    long_prompt_tokens: int = 1024
    """With a pool for long prompts: those of so many tokens or more go there."""

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; choose one of {', '.join(allowed)}.")
        for name in ("max_num_batched_tokens", "max_num_seqs", "block_size", "long_prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.memory_per_rank < 0:
            raise ValueError(f"memory_per_rank is {self.memory_per_rank}; give bytes, or 0: what suits the device.")
        if self.expert_capacity < 0 or self.expert_copies < 0:
            raise ValueError(
                f"expert_capacity is {self.expert_capacity:g} and expert_copies {self.expert_copies}; neither may "
                f"be less than 0 (0: no limit, and no copies)."
            )
        if self.expert_copies and self.expert_placement != "measured":
            raise ValueError(
                f"expert_copies is {self.expert_copies}, and which experts to copy is known from measured load "
                f"only: set expert_placement to measured."
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, max_num_seqs {self.max_num_seqs}: "
                f"a step must hold one token of each sequence. Raise the one or lower the other."
            )

    @property
    def dtype_bytes(self) -> int:
        return DTYPES[self.dtype]

    def to_dict(self) -> dict[str, Any]:
        """As JSON shows it: the layout by its slug."""
        return {**asdict(self), "layout": self.layout.slug}
