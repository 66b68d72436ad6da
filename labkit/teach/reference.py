"""The case that goes through all lessons: four ranks, a model that needs two, short chats and long prompts.

Only the layout changes. The model needs two ranks because the memory of each is bounded: to six sevenths of the
model's weights, for weights plus KV (96 MiB for lab-30m, whose weights are 112 MiB in float32). The arithmetic that
shows it is here, the refusal is the engine's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from labkit.layout import Layout, kv_bytes_per_token, rank_memory
from labkit.model.spec import DTYPE_BYTES, ModelSpec, load_spec
from labkit.teach.html import Table

MIB = 2**20
FULL_SETTINGS = {
    "router": "least-work",
    "admission": "labkit",
    "prefix_cache": True,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 64,
    "block_size": 16,
    "record": True,
    "expert_placement": "plain",
    "expert_copies": 0,
    "expert_capacity": 0.0,
}
"""Every run of a lesson names all of them, so that nothing is left over from somebody else's run."""


@dataclass(frozen=True)
class ReferenceCase:
    """What is fixed in all lessons. `dtype` is the server's: float32 on CPUs, bfloat16 on GPUs."""

    model: str = "lab-30m"
    num_ranks: int = 4
    dtype: str = "float32"

    @property
    def spec(self) -> ModelSpec:
        return load_spec(self.model)

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def budget_bytes(self) -> int:
        """Per rank, weights plus KV: six sevenths of what the weights alone take, in whole MiB."""
        return self.weights_bytes("tp1") * 6 // 7 // MIB * MIB

    def settings(self, **changes: Any) -> dict[str, Any]:
        return {**FULL_SETTINGS, "memory_per_rank": self.budget_bytes, **changes}

    def weights_bytes(self, layout: str) -> int:
        """Of the fullest rank, tensors alone."""
        parsed = Layout.parse(layout)
        return max(
            sum(rank_memory(parsed, self.spec, rank, self.dtype_bytes).values()) for rank in range(parsed.world_size)
        )

    def kv_bytes_per_token(self, layout: str) -> int:
        return kv_bytes_per_token(Layout.parse(layout), self.spec, 0, self.dtype_bytes)

    def arithmetic(self, *layouts: str) -> Table:
        """budget − weights = room for KV, for each layout, by the tensors alone."""
        rows = []
        for slug in layouts:
            weights, per_token = self.weights_bytes(slug), self.kv_bytes_per_token(slug)
            room = self.budget_bytes - weights
            tokens = f"{room // per_token:,} tokens" if room > 0 else "none: it does not fit"
            rows.append(
                [str(Layout.parse(slug)), _mib(self.budget_bytes), _mib(weights), _mib(room)]
                + [f"{per_token:,} B", tokens]
            )
        columns = ["layout", "budget of a rank", "− weights", "= left", "÷ KV of a token", "= KV for"]
        remark = (
            "Predicted, from the shapes of the tensors. A backend may keep more than the tensors: on CPUs a "
            "repacked copy of the output head, which is tied to the embedding here."
        )
        return Table(f"{self.model} in {self.dtype}, per rank and replica", columns, rows, [remark])


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / MIB:,.1f} MiB".replace("-", "−")


def is_quick() -> bool:
    """LABKIT_QUICK=1: the same path with fewer requests, as the tests take it."""
    return os.environ.get("LABKIT_QUICK", "") not in ("", "0")
