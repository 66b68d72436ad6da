"""Rotary positions as one complex product: each pair of a head's dimensions turns by an angle that grows with
position.

Checkpoints pair dimension i with i + head_dim/2; a complex number wants its two halves side by side. So the
rows of the query and key weights are reordered once, at load (`pair_rows`): scores are sums over a head's
dimensions, which do not mind an order that queries and keys share, and a rotation is one multiplication in
place of five small operations. Angles: Su et al. 2021, RoFormer; the Llama-3 stretch of long wavelengths:
Meta's llama-models, apply_scaling.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from labkit.model.spec import Rope, RopeScaling


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """float32 [head_dim / 2]: radians per position of each pair, scaling applied. ValueError on an unknown
    kind.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.scaling is None or rope.scaling.kind == "default":
        return frequencies
    if rope.scaling.kind == "linear":
        return frequencies / rope.scaling.factor
    if rope.scaling.kind == "llama3":
        return _llama3_frequencies(frequencies, rope.scaling)
    raise ValueError(
        f"RoPE scaling of kind {rope.scaling.kind!r} is not supported; default, linear and llama3 are. "
        "Remove rope_scaling from config.json to serve contexts up to the original length."
    )


def _llama3_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended linearly."""
    original = scaling.original_max_positions
    wavelengths = 2 * math.pi / frequencies
    blend = (original / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return blend * frequencies + (1.0 - blend) * frequencies / scaling.factor


def rotation_table(rope: Rope, head_dim: int, num_positions: int, device: torch.device) -> Tensor:
    """complex64 [num_positions, head_dim / 2]: the turn of each pair at each position."""
    angles = torch.outer(torch.arange(num_positions).float(), inverse_frequencies(rope, head_dim))
    return torch.complex(angles.cos(), angles.sin()).to(device)


def pair_rows(rows: Tensor, head_dim: int) -> Tensor:
    """Puts dimension i + head_dim/2 right after i, in each head of a [heads · head_dim, …] weight, bias or
    norm.
    """
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def rotate_(heads: Tensor, turns: Tensor) -> None:
    """Turns paired `heads` [tokens, heads, head_dim] by `turns` [tokens, 1, head_dim / 2], in place."""
    if heads.dtype == torch.float32:
        torch.view_as_complex(heads.unflatten(-1, (-1, 2))).mul_(turns)
        return
    pairs = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2)))
    heads.copy_(torch.view_as_real(pairs * turns).flatten(-2))
