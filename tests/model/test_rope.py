"""Rotations in paired order are those of the checkpoint's own order; frequencies are transformers'."""

from __future__ import annotations

import pytest
import torch

from labkit.model.rope import inverse_frequencies, pair_rows, rotate_, rotation_table
from labkit.model.spec import Rope, RopeScaling

CPU = torch.device("cpu")


def rotate_half(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """The textbook form: dimension i turns with i + D/2. x [T, H, D], angles [T, D/2]."""
    cos, sin = (torch.cat([f, f], -1).unsqueeze(1) for f in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_paired_rotation_is_the_textbook_rotation(dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    rope, positions = Rope(10_000.0), torch.tensor([0, 1, 7, 30, 63])
    want = rotate_half(x.float(), torch.outer(positions.float(), inverse_frequencies(rope, 8)))
    paired = pair_rows(x.reshape(5, 24).T, 8).T.reshape(5, 3, 8).contiguous()
    rotate_(paired, rotation_table(rope, 8, 64, CPU)[positions].unsqueeze(1))
    back = paired.unflatten(-1, (4, 2)).transpose(-1, -2).flatten(-2).float()
    assert torch.allclose(back, want, atol=1e-6 if dtype == torch.float32 else 0.03)


def test_pairing_keeps_heads_apart_and_loses_nothing() -> None:
    assert pair_rows(torch.arange(12), 6).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


@pytest.mark.parametrize("head_dim", [16, 128])
def test_llama3_frequencies_are_those_of_transformers(head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(head_dim=head_dim, rope_parameters=scaling), CPU)
    ours = inverse_frequencies(Rope(500000.0, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)), head_dim)
    plain = inverse_frequencies(Rope(500000.0), head_dim)
    assert torch.allclose(ours, theirs, rtol=1e-6)
    assert not torch.allclose(ours, plain, rtol=1e-3)


def test_linear_scaling_divides_and_an_unknown_kind_is_refused() -> None:
    plain = inverse_frequencies(Rope(1e4), 8)
    assert torch.allclose(inverse_frequencies(Rope(1e4, RopeScaling("linear", 4.0)), 8), plain / 4)
    with pytest.raises(ValueError, match="'longrope' is not supported"):
        inverse_frequencies(Rope(1e4, RopeScaling("longrope")), 8)
