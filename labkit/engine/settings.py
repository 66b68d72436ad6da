"""How the engine is set up: the layout, and everything else that is fixed while a figure is measured.

Changing any of it is a switch. `threads`, the device and the number of ranks belong to the pool and stay.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from labkit.engine.router import POLICIES
from labkit.engine.scheduler import ADMISSIONS
from labkit.layout import Layout

FABRICS = ("shm", "gloo", "nccl")
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CHOICES = {"router": POLICIES, "admission": ADMISSIONS, "fabric": FABRICS, "dtype": tuple(DTYPES)}


@dataclass(frozen=True)
class EngineSettings:
    layout: Layout = Layout()
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

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; choose one of {', '.join(allowed)}.")
        for name in ("max_num_batched_tokens", "max_num_seqs", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.memory_per_rank < 0:
            raise ValueError(f"memory_per_rank is {self.memory_per_rank}; give bytes, or 0: what suits the device.")
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
