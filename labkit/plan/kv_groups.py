"""How vLLM pages the KV cache: layers of one kind in groups of equal size, so that every block of every group has the
same bytes (v1/core/kv_cache_utils.py).

A plain model is one group. Sliding windows and linear attention make more: a request then takes a block of each group,
for the whole context, for the window, or one for the state. Blocks are raised until a layer's block holds a state.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.layout import Layout, layers, stored_block
from labkit.model.shapes import DTYPE_BYTES, ModelSpec
from labkit.plan.work import EngineSettings

ALIGNMENT = 16
"""Tokens that a block is a multiple of."""
LATENT_BLOCK = 64
"""What vLLM's kernels for latent attention on Hopper page by."""
UNEVEN = 1.5
"""Up to here vLLM pads the smaller kind of layers to the larger instead of splitting the larger."""


@dataclass(frozen=True, slots=True)
class KvGroups:
    """Of one rank. `block_bytes`: of one block of one group, all its layers. The counts of groups say how many blocks a
    request takes: `full` for each `block_size` tokens, `sliding` at most a window's, `states` one each."""

    block_size: int
    block_bytes: int
    full: int
    sliding: int
    states: int
    window: int

    def blocks(self, tokens: int) -> int:
        """What a request of `tokens` holds while it decodes."""
        whole = -(-tokens // self.block_size)
        windowed = min(whole, -(-(self.window - 1) // self.block_size) + 1) if self.sliding else 0
        return self.full * whole + self.sliding * windowed + self.states

    @property
    def beside(self) -> int:
        """Blocks of a long request that do not grow with it."""
        return self.blocks(10**9) - self.full * -(-(10**9) // self.block_size)


def cache_dtype_bytes(spec: ModelSpec, settings: EngineSettings) -> int:
    """Raises ValueError for a dtype that nobody keeps a cache in."""
    name = settings.kv_cache_dtype.lower()
    if name == "auto":
        return spec.dtype_bytes
    if name.startswith("fp8") or name == "float8_e4m3fn":
        return 1
    if name in DTYPE_BYTES:
        return DTYPE_BYTES[name]
    known = ", ".join(("auto", "fp8", *DTYPE_BYTES))
    raise ValueError(f"kv_cache_dtype {settings.kv_cache_dtype!r} is unknown: give one of {known}.")


def state_bytes(layout: Layout, spec: ModelSpec) -> int:
    """Of one layer of linear attention on a rank, for one sequence: its state and the convolution's last inputs."""
    linear = spec.linear_attention
    if linear is None:
        return 0
    conv = linear.channels * (linear.conv_kernel - 1) * min(2, spec.dtype_bytes)
    return (linear.state_numbers * linear.state_bytes + conv) // layout.tp


def token_bytes(layout: Layout, spec: ModelSpec, dtype_bytes: int) -> int:
    """Of one token in one layer on a rank, before positions are shared out by dcp."""
    return max(1, spec.num_cached_heads // layout.tp) * spec.cached_dim * dtype_bytes


def block_tokens(layout: Layout, spec: ModelSpec, settings: EngineSettings) -> int:
    """Tokens of a block: as set, what latent attention needs, or as many as a state is large."""
    if spec.mla and settings.policy == "vllm":
        return max(settings.block_size, LATENT_BLOCK)
    if not spec.linear_layers:
        return settings.block_size
    each = token_bytes(layout, spec, cache_dtype_bytes(spec, settings)) * ALIGNMENT
    return max(settings.block_size, -(-state_bytes(layout, spec) // each) * ALIGNMENT)


def kv_groups(layout: Layout, spec: ModelSpec, rank: int, settings: EngineSettings) -> KvGroups:
    """The groups of a rank's layers. A rank without any layer that caches has blocks of no bytes."""
    size = block_tokens(layout, spec, settings)
    page = stored_block(layout, size) * token_bytes(layout, spec, cache_dtype_bytes(spec, settings))
    mine = layers(layout, spec, rank)
    states = sum(spec.is_linear_layer(layer) for layer in mine)
    windows = [spec.window(layer) for layer in mine if not spec.is_linear_layer(layer)]
    sliding = sum(window is not None for window in windows) if settings.policy == "vllm" else 0
    counts = [count for count in (len(windows) - sliding, sliding, states) if count]
    if not counts:
        return KvGroups(size, 0, 0, 0, 0, 0)
    group = max(counts) if max(counts) < UNEVEN * min(counts) else min(counts)
    full, sliding, states = (-(-count // group) for count in (len(windows) - sliding, sliding, states))
    return KvGroups(size, page * group, full, sliding, states, spec.sliding_window or 0)
