"""Small models that between them have every way of being cut: the tests of layouts walk over all of them."""

from __future__ import annotations

from dataclasses import replace

from labkit.model.spec import MlaSpec, ModelSpec, MoeSpec, Rope

DENSE = ModelSpec(
    name="dense",
    family="llama",
    num_layers=3,
    hidden_size=32,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,  # not hidden ÷ heads
    intermediate_size=48,
    vocab_size=151,
    rope=Rope(10_000.0),
)
MOE = replace(
    DENSE,
    name="moe",
    family="qwen3_moe",
    qk_norm=True,
    moe=MoeSpec(num_experts=6, top_k=2, intermediate_size=16, dense_layers=frozenset({0})),
)
SHARED_MOE = replace(
    MOE,
    name="shared-moe",
    family="qwen2_moe",
    qk_norm=False,
    qkv_bias=True,
    moe=MoeSpec(num_experts=6, top_k=2, intermediate_size=16, shared_intermediate_size=32, shared_gate=True),
)
MIXTRAL = replace(
    DENSE, name="mixtral", family="mixtral", moe=MoeSpec(num_experts=8, top_k=2, intermediate_size=48)
)
LATENT = replace(
    DENSE,
    name="latent",
    family="deepseek_v3",
    num_kv_heads=8,
    head_dim=12,
    mla=MlaSpec(kv_lora_rank=10, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, q_lora_rank=12),
    moe=replace(SHARED_MOE.moe, shared_gate=False, router_bias=True),
)
SPECS = {
    spec.name: spec
    for spec in (
        DENSE,
        replace(DENSE, name="tied", tie_word_embeddings=True),
        replace(DENSE, name="qkv-bias", family="qwen2", qkv_bias=True),
        replace(DENSE, name="all-biases", qkv_bias=True, o_bias=True, mlp_bias=True),
        replace(DENSE, name="qk-norm", family="qwen3", qk_norm=True),
        replace(DENSE, name="one-kv-head", num_kv_heads=1),
        replace(DENSE, name="two-kv-heads", num_kv_heads=2, num_heads=16),
        MOE,
        SHARED_MOE,
        MIXTRAL,
        LATENT,
    )
}
