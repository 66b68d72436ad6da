"""A model in other bits than its config's: which of its matrices are quantised in practice, and in what groups.

Linear layers are; embedding, head, norms and routers stay as they are computed in. How checkpoints in circulation do
it: fp8 in blocks of 128 × 128 (Qwen, DeepSeek, MiniMax) or with one scale a tensor (NVIDIA's Llama and Mixtral), fp4
as NVFP4 with groups of 16 (attention with a latent is left alone), int4 with groups of 128 and 16-bit scales.
"""

from __future__ import annotations

from dataclasses import replace

from labkit.model.shapes import ModelSpec, Quantization

UNCHANGED = ("", "auto", "as released", "model default", "model default (not stated)", "nan")
SIXTEEN_BITS = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16"}
EIGHT_BITS = ("fp8", "float8", "w8a8")
FOUR_BITS = ("fp4", "nvfp4", "mxfp4", "float4", "nvfp4/fp8")
INT4 = ("int4", "w4a16", "awq", "gptq-int4")

BLOCKS_OF_128 = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "deepseek_v3", "kimi_k2", "minimax_m2")
"""Families whose fp8 checkpoints have a scale for every 128 × 128 weights, by their makers' own configs."""


def with_precision(spec: ModelSpec, precision: str) -> ModelSpec:
    """`spec` with its linear layers in `precision`: bf16, fp16, fp8, fp4 (NVFP4), int4; "" leaves it as it is.

    A model that is published in so few bits or fewer keeps its own format: nobody serves gpt-oss with its experts blown
    up to fp8. Raises ValueError with a sentence for a precision that is unknown.
    """
    wanted, own = precision.strip().lower(), spec.quantization
    if wanted in UNCHANGED:
        return spec
    if wanted in SIXTEEN_BITS:
        return replace(spec, quantization=None, dtype=SIXTEEN_BITS[wanted])
    if wanted in EIGHT_BITS:
        return spec if own and own.bits <= 8 else replace(spec, quantization=_fp8(spec))
    if wanted in FOUR_BITS:
        return spec if own and own.bits <= 4 else replace(spec, quantization=_nvfp4(spec))
    if wanted in INT4:
        own_int4 = own is not None and own.bits <= 4
        return spec if own_int4 else replace(spec, quantization=Quantization("int4", 4, (1, 128)))
    raise ValueError(
        f"Precision {precision!r} is unknown: give bf16, fp16, fp8, fp4 or int4, or leave it out for what the model's "
        f"config says."
    )


def _fp8(spec: ModelSpec) -> Quantization:
    return Quantization("fp8", 8, (128, 128) if spec.family in BLOCKS_OF_128 else (0, 0), scale_bytes=4)


def _nvfp4(spec: ModelSpec) -> Quantization:
    """4-bit numbers with an fp8 scale for 16 of them (the scale of a whole tensor is not worth counting)."""
    parts = frozenset({"mlp", "experts", "shared_experts"}) if spec.mla else None
    return Quantization("nvfp4", 4, (1, 16), scale_bytes=1, parts=parts)
