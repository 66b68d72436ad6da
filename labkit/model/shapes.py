"""A model as numbers: the shapes that decide what it weighs, what it computes and how it can be cut.

`ModelSpec` is a frozen value read from a Hugging Face config.json (see `labkit.model.spec.load_spec`). It
imports no torch, so the planner, the pages and the scheduler can ask it anything. How its tensors are named
and shaped stands in `labkit.model.tensors`; the sums over them in `labkit.model.counts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context; `kind` is the config's rope_type."""

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding: angle of pair i at position p is p · theta^(−2i/head_dim)."""

    theta: float
    scaling: RopeScaling | None = None
    share: float = 1.0
    """Of a head's width that is rotated (partial_rotary_factor)."""


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture of experts: `top_k` of `num_experts` gated MLPs a token, and shared ones that every token
    passes.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    """Of one routed expert."""
    shared_intermediate_size: int = 0
    """Of the shared experts together; 0: none."""
    shared_gate: bool = False
    """Whether a sigmoid gate scales the shared expert (Qwen2-MoE)."""
    router_bias: bool = False
    """Whether the router carries a per-expert correction bias (DeepSeek-V3)."""
    norm_top_k: bool = True
    """Whether the weights of a token's top_k experts are divided by their sum."""
    dense_layers: frozenset[int] = frozenset()
    """Layers that keep an ordinary MLP of `ModelSpec.intermediate_size`."""
    bias: bool = False
    """Whether the router and the experts add biases (gpt-oss)."""

    def __post_init__(self) -> None:
        if self.top_k > self.num_experts:
            raise ValueError(f"a token goes to {self.top_k} experts, and there are {self.num_experts}.")


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek): the cache holds one latent and one rotary key a token, for all
    heads.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None

    @property
    def latent_dim(self) -> int:
        """Numbers that one token leaves in the cache of one layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Gated delta-rule attention (Qwen3-Next, Qwen3.5): a layer keeps one state a sequence, however long that is."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    state_bytes: int = 4
    """A number of the recurrent state; the convolution's last inputs are kept as the model computes."""

    @property
    def channels(self) -> int:
        """Queries, keys and values that the short convolution runs over."""
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim

    @property
    def state_numbers(self) -> int:
        """Of the recurrent state: one matrix [value dim, key dim] a value head."""
        return self.num_value_heads * self.value_head_dim * self.key_head_dim


@dataclass(frozen=True, slots=True)
class Quantization:
    """Weights in few bits with a scale a group. A group that a cut would break makes the layout illegal.

    `group` is the group's extent along (out features, in features); 0 means the whole axis (per channel or
    tensor).
    """

    method: str
    bits: int
    group: tuple[int, int]
    scale_bytes: int = 2
    parts: frozenset[str] | None = None
    """The parts of the model whose matrices are quantised; None: every one but embedding, router and head."""
    padded: bool = False
    """Whether engines share out whole groups unevenly and pad the rest (MXFP4), so that a cut never breaks one."""

    def covers(self, part: str) -> bool:
        return self.parts is None or part in self.parts

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Packed weights plus one scale a group, for a matrix [out features, in features]."""
        rows, columns = shape
        groups = -(-rows // (self.group[0] or rows)) * -(-columns // (self.group[1] or columns))
        return -(-rows * columns * self.bits // 8) + groups * self.scale_bytes


@dataclass(frozen=True)
class ModelSpec:
    """Shapes and switches of one decoder-only model. Sizes are counts of numbers, never bytes."""

    name: str
    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope: Rope
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-5
    max_positions: int = 8192
    sliding_window: int | None = None
    full_attention_layers: frozenset[int] = frozenset()
    """Layers that ignore `sliding_window`."""
    qk_norm_whole: bool = False
    """Whether `qk_norm` has a weight for every number of all heads (MiniMax-M2), not one of a head's width."""
    attention_gate: bool = False
    """Whether q_proj also makes a gate of the output's width (Qwen3-Next, Qwen3.5)."""
    sinks: bool = False
    """Whether every query head has a learned logit beside its keys (gpt-oss)."""
    linear_attention: LinearAttention | None = None
    linear_layers: frozenset[int] = frozenset()
    """Layers of `linear_attention`; they keep a state instead of keys and values."""
    num_draft_layers: int = 0
    """Layers of the multi-token-prediction module in the checkpoint; engines load them only to speculate."""
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None
    quantization: Quantization | None = None
    dtype: str = "float32"
    bos_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.num_kv_heads <= self.num_heads or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly; "
                f"num_attention_heads must be a multiple of num_key_value_heads."
            )

    # ---- what the layers are

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.moe.dense_layers

    def is_linear_layer(self, layer: int) -> bool:
        return layer in self.linear_layers

    def layer_kinds(self, layers: Iterable[int]) -> Counter[tuple[bool, bool]]:
        """(mixture of experts?, linear attention?) → how many of `layers` are of that kind; kinds are alike."""
        return Counter((self.is_moe_layer(layer), layer in self.linear_layers) for layer in layers)

    @property
    def num_cached_layers(self) -> int:
        """Layers that keep something for every token."""
        return self.num_layers - len(self.linear_layers)

    def window(self, layer: int) -> int | None:
        """How many positions back a query of this layer sees, itself included; None: all of them."""
        return None if layer in self.full_attention_layers else self.sliding_window

    @property
    def num_cached_heads(self) -> int:
        """KV heads in the cache: with MLA one latent serves every head."""
        return 1 if self.mla else self.num_kv_heads

    @property
    def cached_dim(self) -> int:
        """Numbers that one token leaves in one layer for one cached head (keys and values together)."""
        return self.mla.latent_dim if self.mla else 2 * self.head_dim

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    # ---- sums

    def parameters(self) -> dict[str, int]:
        """Part (embedding, attention, mlp, experts, shared_experts, router, norm, head) → number of
        parameters.

        A tied head is counted once, under embedding.
        """
        from labkit.model.counts import parameters

        return parameters(self)

    @property
    def num_parameters(self) -> int:
        return sum(self.parameters().values())

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token passes: of the routed experts only top_k."""
        from labkit.model.counts import active_parameters

        return sum(active_parameters(self).values())

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """KV-cache bytes of one token over all layers: 2 · kv_heads · head_dim · layers · bytes (MLA: the
        latent; layers of linear attention: nothing).
        """
        return self.num_cached_layers * self.num_cached_heads * self.cached_dim * dtype_bytes

    def flops(self, num_tokens: int, context_tokens: int = 0, num_logits: int = 1) -> dict[str, int]:
        """Part → floating-point operations to run `num_tokens` new tokens of one sequence on top of
        `context_tokens` cached ones: a prefill is flops(n), a decode step flops(1, context). See
        `labkit.model.counts.flops`.
        """
        from labkit.model.counts import flops

        return flops(self, num_tokens, context_tokens, num_logits)
