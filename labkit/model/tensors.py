"""Every tensor of a model by its Hugging Face name: its shape, its part, and along what it may be cut.

The table never speaks of ranks: it says that the rows of q_proj are query heads and the columns of down_proj
the intermediate, and `labkit.layout` decides who owns which of them. All counting (parameters, bytes, slices)
goes over this one table. Linear weights are [out features, in features], as checkpoints keep them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from labkit.model.shapes import LinearAttention, MlaSpec, ModelSpec, MoeSpec

EMBEDDING, ATTENTION, MLP, EXPERTS = "embedding", "attention", "mlp", "experts"
SHARED_EXPERTS, ROUTER, NORM, HEAD = "shared_experts", "router", "norm", "head"
PARTS = (EMBEDDING, ATTENTION, MLP, EXPERTS, SHARED_EXPERTS, ROUTER, NORM, HEAD)

QUERY_HEADS, KV_HEADS, INTERMEDIATE, VOCAB = (
    "query heads",
    "KV heads",
    "intermediate columns",
    "vocabulary rows",
)
LINEAR_KEYS, LINEAR_VALUES = "key heads of linear attention", "value heads of linear attention"

BLOCK_SPARSE = ("mixtral", "minimax_m2")
"""Families that call their mixture block_sparse_moe, and an expert's matrices w1, w3 and w2."""
EMBED_TENSOR = "model.embed_tokens.weight"
HEAD_TENSOR = "lm_head.weight"


class Tensor(NamedTuple):
    """One tensor. `cut` names what the index along `dim` counts, None when every rank needs all of it."""

    name: str
    shape: tuple[int, ...]
    part: str
    dim: int | None = None
    cut: str | None = None
    layer: int | None = None
    expert: int | None = None
    linear: bool = False
    """Whether it is a matrix that a quantised checkpoint keeps in few bits."""

    @property
    def num_elements(self) -> int:
        product = 1
        for extent in self.shape:
            product *= extent
        return product


def cut_items(spec: ModelSpec, tensor: Tensor) -> int:
    """How many indivisible items the cut dimension holds: heads for head cuts, single rows or columns
    otherwise.
    """
    assert tensor.dim is not None
    if tensor.cut == QUERY_HEADS:
        return spec.num_heads
    if tensor.cut == KV_HEADS:
        return spec.num_kv_heads
    if spec.linear_attention and tensor.cut in (LINEAR_KEYS, LINEAR_VALUES):
        linear = spec.linear_attention
        return linear.num_key_heads if tensor.cut == LINEAR_KEYS else linear.num_value_heads
    return tensor.shape[tensor.dim]


def _column(name: str, out: int, into: int, part: str, cut: str, bias: bool = False) -> Iterator[Tensor]:
    """A linear layer whose outputs are shared out: weight rows and bias are cut together."""
    yield Tensor(f"{name}.weight", (out, into), part, 0, cut, linear=True)
    if bias:
        yield Tensor(f"{name}.bias", (out,), part, 0, cut)


def _row(name: str, out: int, into: int, part: str, cut: str, bias: bool = False) -> Iterator[Tensor]:
    """A linear layer whose inputs are shared out: the outputs are summed over ranks, then the whole bias is
    added.
    """
    yield Tensor(f"{name}.weight", (out, into), part, 1, cut, linear=True)
    if bias:
        yield Tensor(f"{name}.bias", (out,), part)


def _attention(spec: ModelSpec) -> Iterator[Tensor]:
    hidden, q_out, kv_out = (
        spec.hidden_size,
        spec.num_heads * spec.head_dim,
        spec.num_kv_heads * spec.head_dim,
    )
    gated = 2 if spec.attention_gate else 1  # query and gate of a head stand together
    yield from _column("self_attn.q_proj", gated * q_out, hidden, ATTENTION, QUERY_HEADS, spec.qkv_bias)
    yield from _column("self_attn.k_proj", kv_out, hidden, ATTENTION, KV_HEADS, spec.qkv_bias)
    yield from _column("self_attn.v_proj", kv_out, hidden, ATTENTION, KV_HEADS, spec.qkv_bias)
    yield from _row("self_attn.o_proj", hidden, q_out, ATTENTION, QUERY_HEADS, spec.o_bias)
    if spec.sinks:
        yield Tensor("self_attn.sinks", (spec.num_heads,), ATTENTION, 0, QUERY_HEADS)
    if spec.qk_norm_whole:
        yield Tensor("self_attn.q_norm.weight", (q_out,), NORM, 0, QUERY_HEADS)
        yield Tensor("self_attn.k_norm.weight", (kv_out,), NORM, 0, KV_HEADS)
    elif spec.qk_norm:  # one weight of a head's width, the same for every head: each rank needs it whole
        yield Tensor("self_attn.q_norm.weight", (spec.head_dim,), NORM)
        yield Tensor("self_attn.k_norm.weight", (spec.head_dim,), NORM)


def _latent_attention(spec: ModelSpec, mla: MlaSpec) -> Iterator[Tensor]:
    hidden, q_out = spec.hidden_size, spec.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank is None:
        yield from _column("self_attn.q_proj", q_out, hidden, ATTENTION, QUERY_HEADS)
    else:
        yield Tensor("self_attn.q_a_proj.weight", (mla.q_lora_rank, hidden), ATTENTION, linear=True)
        yield Tensor("self_attn.q_a_layernorm.weight", (mla.q_lora_rank,), NORM)
        yield from _column("self_attn.q_b_proj", q_out, mla.q_lora_rank, ATTENTION, QUERY_HEADS)
    kv_out = spec.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield Tensor("self_attn.kv_a_proj_with_mqa.weight", (mla.latent_dim, hidden), ATTENTION, linear=True)
    yield Tensor("self_attn.kv_a_layernorm.weight", (mla.kv_lora_rank,), NORM)
    yield from _column("self_attn.kv_b_proj", kv_out, mla.kv_lora_rank, ATTENTION, QUERY_HEADS)
    yield from _row("self_attn.o_proj", hidden, spec.num_heads * mla.v_head_dim, ATTENTION, QUERY_HEADS)


def _gated_mlp(
    prefix: str,
    hidden: int,
    width: int,
    part: str,
    bias: bool = False,
    names: tuple[str, str, str] | None = None,
) -> Iterator[Tensor]:
    gate, up, down = names or ("gate_proj", "up_proj", "down_proj")
    yield from _column(f"{prefix}.{gate}", width, hidden, part, INTERMEDIATE, bias)
    yield from _column(f"{prefix}.{up}", width, hidden, part, INTERMEDIATE, bias)
    yield from _row(f"{prefix}.{down}", hidden, width, part, INTERMEDIATE, bias)


def expert_tensors(spec: ModelSpec, expert: int) -> list[Tensor]:
    """The tensors of one routed expert, named from the layer on."""
    assert spec.moe is not None
    mixtral = spec.family in BLOCK_SPARSE
    prefix = f"{'block_sparse_moe' if mixtral else 'mlp'}.experts.{expert}"
    names = ("w1", "w3", "w2") if mixtral else None
    tensors = _gated_mlp(prefix, spec.hidden_size, spec.moe.intermediate_size, EXPERTS, spec.moe.bias, names)
    return [tensor._replace(expert=expert) for tensor in tensors]


def _moe_common(spec: ModelSpec, moe: MoeSpec) -> Iterator[Tensor]:
    """What a MoE layer holds besides its routed experts."""
    prefix = "block_sparse_moe" if spec.family in BLOCK_SPARSE else "mlp"
    gate = "router" if moe.bias else "gate"
    yield Tensor(f"{prefix}.{gate}.weight", (moe.num_experts, spec.hidden_size), ROUTER)
    if moe.bias:
        yield Tensor(f"{prefix}.{gate}.bias", (moe.num_experts,), ROUTER)
    if moe.router_bias:
        inside = "" if spec.family == "minimax_m2" else "gate."
        yield Tensor(f"{prefix}.{inside}e_score_correction_bias", (moe.num_experts,), ROUTER)
    if moe.shared_intermediate_size:
        name = "mlp.shared_expert" if moe.shared_gate else "mlp.shared_experts"
        yield from _gated_mlp(name, spec.hidden_size, moe.shared_intermediate_size, SHARED_EXPERTS)
    if moe.shared_gate:
        yield Tensor("mlp.shared_expert_gate.weight", (1, spec.hidden_size), ROUTER)


def _linear_attention(spec: ModelSpec, linear: LinearAttention) -> Iterator[Tensor]:
    """Gated delta rule. Checkpoints fuse q, k and v into in_proj_qkv and conv1d; a cut takes each apart, so they are
    three tensors here.
    """
    hidden, keys = spec.hidden_size, linear.num_key_heads * linear.key_head_dim
    values = linear.num_value_heads * linear.value_head_dim
    widths = (("q", keys, LINEAR_KEYS), ("k", keys, LINEAR_KEYS), ("v", values, LINEAR_VALUES))
    for name, width, cut in widths:
        yield from _column(f"linear_attn.in_proj_qkv.{name}", width, hidden, ATTENTION, cut)
    yield from _column("linear_attn.in_proj_z", values, hidden, ATTENTION, LINEAR_VALUES)
    for name in ("a", "b"):  # one number a head: too few rows to quantise
        rows = (linear.num_value_heads, hidden)
        yield Tensor(f"linear_attn.in_proj_{name}.weight", rows, ATTENTION, 0, LINEAR_VALUES)
    for name, width, cut in widths:
        yield Tensor(f"linear_attn.conv1d.{name}.weight", (width, 1, linear.conv_kernel), ATTENTION, 0, cut)
    for name in ("dt_bias", "A_log"):
        yield Tensor(f"linear_attn.{name}", (linear.num_value_heads,), ATTENTION, 0, LINEAR_VALUES)
    yield Tensor("linear_attn.norm.weight", (linear.value_head_dim,), NORM)
    yield from _row("linear_attn.out_proj", hidden, values, ATTENTION, LINEAR_VALUES)


@lru_cache(maxsize=256)
def layer_common_tensors(spec: ModelSpec, moe_layer: bool, linear_layer: bool = False) -> tuple[Tensor, ...]:
    """All tensors of one layer but its routed experts, named from the layer on. Layers of a kind agree."""
    hidden = spec.hidden_size
    found = [Tensor("input_layernorm.weight", (hidden,), NORM)]
    if linear_layer and spec.linear_attention:
        found += _linear_attention(spec, spec.linear_attention)
    else:
        found += _latent_attention(spec, spec.mla) if spec.mla else _attention(spec)
    found.append(Tensor("post_attention_layernorm.weight", (hidden,), NORM))
    if moe_layer and spec.moe:
        found += _moe_common(spec, spec.moe)
    else:
        found += _gated_mlp("mlp", hidden, spec.intermediate_size, MLP, spec.mlp_bias)
    return tuple(found)


def layer_tensors(spec: ModelSpec, layer: int, experts: Iterable[int]) -> Iterator[Tensor]:
    """The tensors of one layer, with the routed experts given."""
    moe_layer = spec.is_moe_layer(layer)
    local = list(layer_common_tensors(spec, moe_layer, spec.is_linear_layer(layer)))
    if moe_layer:
        for expert in experts:
            local += expert_tensors(spec, expert)
    for tensor in local:
        yield tensor._replace(name=f"model.layers.{layer}.{tensor.name}", layer=layer)


def embedding_tensor(spec: ModelSpec) -> Tensor:
    return Tensor(EMBED_TENSOR, (spec.vocab_size, spec.hidden_size), EMBEDDING, 0, VOCAB)


def final_norm_tensor(spec: ModelSpec) -> Tensor:
    return Tensor("model.norm.weight", (spec.hidden_size,), NORM)


def head_tensor(spec: ModelSpec) -> Tensor:
    """The output projection; with tied embeddings the checkpoint has the embedding only."""
    name = EMBED_TENSOR if spec.tie_word_embeddings else HEAD_TENSOR
    return Tensor(name, (spec.vocab_size, spec.hidden_size), HEAD, 0, VOCAB)


def all_tensors(spec: ModelSpec) -> Iterator[Tensor]:
    """Every tensor of the checkpoint, each once."""
    experts = range(spec.moe.num_experts) if spec.moe else range(0)
    yield embedding_tensor(spec)
    for layer in range(spec.num_layers):
        yield from layer_tensors(spec, layer, experts)
    yield final_norm_tensor(spec)
    if not spec.tie_word_embeddings:
        yield head_tensor(spec)
