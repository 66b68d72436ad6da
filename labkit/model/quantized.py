"""Quantised checkpoints as arithmetic: how many bits a weight takes, and which groups of weights share a
scale.

A group must lie whole on one rank, which is what makes some tensor-parallel degrees illegal. Reads the
`quantization_config` of GPTQ, AWQ, FP8 (block or whole-tensor), MXFP4 and compressed-tensors checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from labkit.model.shapes import Quantization


def _grouped(method: str, section: Mapping[str, Any]) -> Quantization:
    """GPTQ and AWQ: groups run along the input features; −1 means one group over all of them."""
    bits, size = (
        section.get("bits", section.get("w_bit")),
        section.get("group_size", section.get("q_group_size")),
    )
    if not isinstance(bits, int) or not isinstance(size, int):
        raise ValueError(f"quantization_config of {method} needs whole numbers for bits and group_size.")
    return Quantization(method, bits, (1, max(size, 0)))


def _fp8(section: Mapping[str, Any]) -> Quantization:
    block = section.get("weight_block_size")
    return Quantization("fp8", 8, _block(block) if block else (0, 0), scale_bytes=4)


def _block(given: Any) -> tuple[int, int]:
    match given:
        case [int(rows), int(columns)] if min(rows, columns) > 0:
            return rows, columns
    raise ValueError(f"quantization_config has the block {given!r}; a block is two whole numbers, such as [128, 128].")


def _compressed(section: Mapping[str, Any]) -> Quantization:
    groups = section.get("config_groups") or {}
    weights: Mapping[str, Any] = next((g["weights"] for g in groups.values() if g.get("weights")), {})
    if not isinstance(weights.get("num_bits"), int):
        raise ValueError(
            "quantization_config of compressed-tensors has no config_groups with weights.num_bits."
        )
    block = weights.get("block_structure")
    if block:
        return Quantization("compressed-tensors", weights["num_bits"], _block(block))
    per_tensor = weights.get("strategy") == "tensor"
    return Quantization(
        "compressed-tensors", weights["num_bits"], (0 if per_tensor else 1, weights.get("group_size") or 0)
    )


# A module of each part whose matrices may be quantised, as checkpoints name it.
_MODULES = {
    "attention": "model.layers.3.self_attn.o_proj",
    "mlp": "model.layers.3.mlp.down_proj",
    "experts": "model.layers.3.mlp.experts.0.down_proj",
    "shared_experts": "model.layers.3.mlp.shared_experts.down_proj",
}


def _names(pattern: str, module: str) -> bool:
    """Whether a pattern of a list of modules left alone names `module`: re:… a regular expression, else whole parts of
    the name between dots, where * stands for any of them.
    """
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error as error:
            raise ValueError(f"quantization_config leaves alone {pattern!r}, no regular expression: {error}.") from None
    words = r"\.".join("[^.]+" if word == "*" else re.escape(word) for word in pattern.split("."))
    return re.search(rf"(^|\.){words}(\.|$)", module) is not None


def _quantised_parts(left_alone: Iterable[str]) -> frozenset[str] | None:
    patterns = list(left_alone)
    kept = {part for part, module in _MODULES.items() if any(_names(pattern, module) for pattern in patterns)}
    return frozenset(_MODULES) - kept if kept else None


def _mxfp4(section: Mapping[str, Any]) -> Quantization:
    """32 numbers of 4 bits with an exponent of 8 (OCP Microscaling Formats, 2023)."""
    return Quantization("mxfp4", 4, (1, 32), scale_bytes=1, padded=True)


def _read(section: Mapping[str, Any]) -> Quantization:
    method = section.get("quant_method")
    if method in ("gptq", "awq"):
        return _grouped(method, section)
    if method == "fp8":
        return _fp8(section)
    if method == "mxfp4":
        return _mxfp4(section)
    if method == "compressed-tensors":
        return _compressed(section)
    raise ValueError(
        f"quantisation {method!r} is unknown; known are gptq, awq, fp8, mxfp4 and compressed-tensors. Without its "
        f"group size nobody can say which layouts keep its groups whole."
    )


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """The config's quantisation, or None. Raises ValueError with a sentence for an unknown method."""
    section = config.get("quantization_config")
    if not section:
        return None
    if not isinstance(section, Mapping):
        raise ValueError(f"quantization_config is {section!r}; it must be a table with quant_method.")
    quantization = _read(section)
    left_alone = section.get("modules_to_not_convert") or section.get("ignore") or ()
    return replace(quantization, parts=_quantised_parts(left_alone))
