"""KV blocks as vLLM pages them: plain, latent, windowed and hybrid models, shared out by tp, pp and dcp."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labkit.layout import Layout
from labkit.model.shapes import LinearAttention
from labkit.model.spec import load_spec
from labkit.plan.kv_groups import KvGroups, kv_groups
from labkit.plan.work import EngineSettings

SETTINGS = EngineSettings()


@pytest.mark.parametrize(
    ("model", "layout", "block_bytes"),
    [
        ("llama-3.1-8b", "tp1", 16 * 2 * 8 * 128 * 2 * 32),  # 2 MiB, as vLLM says for it
        ("llama-3.1-8b", "tp4", 16 * 2 * 2 * 128 * 2 * 32),
        ("llama-3.1-8b", "tp8", 16 * 2 * 1 * 128 * 2 * 32),
        ("llama-3.1-8b", "pp2", 16 * 2 * 8 * 128 * 2 * 16),
        ("qwen3-235b-a22b", "tp8", 16 * 2 * 1 * 128 * 2 * 94),  # 4 KV heads over 8 ranks: copies
        ("qwen3-235b-a22b", "tp8xdcp2", 8 * 2 * 1 * 128 * 2 * 94),  # the copies share positions out
        ("deepseek-v3", "tp8", 64 * 576 * 2 * 61),  # one latent for all heads, on every rank
        ("deepseek-v3", "tp8xdcp8", 8 * 576 * 2 * 61),
    ],
)
def test_a_block_weighs_what_its_layers_keep_of_its_tokens(model: str, layout: str, block_bytes: int) -> None:
    groups = kv_groups(Layout.parse(layout), load_spec(model), 0, SETTINGS)
    assert (groups.block_bytes, groups.full, groups.sliding, groups.states) == (block_bytes, 1, 0, 0)
    assert groups.blocks(1000) == -(-1000 // groups.block_size)


def test_fp8_halves_a_block() -> None:
    spec = load_spec("llama-3.1-8b")
    half = kv_groups(Layout(), spec, 0, replace(SETTINGS, kv_cache_dtype="fp8")).block_bytes
    assert 2 * half == kv_groups(Layout(), spec, 0, SETTINGS).block_bytes
    with pytest.raises(ValueError, match="'int3' is unknown: give one of auto, fp8"):
        kv_groups(Layout(), spec, 0, replace(SETTINGS, kv_cache_dtype="int3"))


def test_windows_make_a_group_of_their_own() -> None:
    groups = kv_groups(Layout(), load_spec("gpt-oss-120b"), 0, SETTINGS)
    assert groups == KvGroups(16, 16 * 2 * 8 * 64 * 2 * 18, 1, 1, 0, 128)
    assert groups.blocks(64) == 4 + 4  # shorter than the window
    assert groups.blocks(16_000) == 1000 + 9  # 127 positions back touch at most 9 blocks
    assert groups.beside == 9


def test_a_model_of_windows_alone_is_bounded_by_them() -> None:
    spec = replace(load_spec("mistral-7b-v0.3"), sliding_window=4096)
    groups = kv_groups(Layout(), spec, 0, SETTINGS)
    assert (groups.full, groups.sliding) == (0, 1)
    assert groups.blocks(100_000) == 257


def test_a_hybrid_pages_by_its_state() -> None:
    """Numbers of vLLM 0.22's own log for Qwen3.5-4B: "Setting attention block size to 528 tokens", "Padding mamba page
    size by 0.76%".
    """
    spec = replace(
        load_spec("qwen3.5-397b-a17b"), num_layers=32, num_kv_heads=4, moe=None, num_heads=16,
        linear_layers=frozenset(layer for layer in range(32) if layer % 4 != 3),
        linear_attention=LinearAttention(16, 32, 128, 128, 4),
    )  # fmt: skip
    groups = kv_groups(Layout(), spec, 0, SETTINGS)
    state = 32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * 2
    assert groups.block_size == 528
    assert 528 * 2 * 4 * 256 * 2 / state == pytest.approx(1.0076, abs=5e-5)
    assert groups == KvGroups(528, 528 * 4096 * 8, 1, 0, 3, 0)  # 8 full layers; 24 of states in 3 groups
    assert groups.blocks(5280) == 10 + 3


def test_kinds_of_about_as_many_layers_are_padded_not_split() -> None:
    """vLLM pads 12 and 13 to two groups of 13 (gpt-oss-20b with a draft)."""
    spec = replace(load_spec("gpt-oss-120b"), num_layers=25, full_attention_layers=frozenset(range(13)))
    assert kv_groups(Layout(), spec, 0, SETTINGS).block_bytes == 16 * 2 * 8 * 64 * 2 * 13


def test_a_stage_pages_its_own_layers() -> None:
    layout, spec = Layout(pp=4), load_spec("qwen3.5-397b-a17b")
    found = [kv_groups(layout, spec, rank, SETTINGS) for rank in range(4)]
    page = found[0].block_size * 2 * 2 * 256 * 2
    # stage 0 has layers 0–14: 3 of attention, 12 of states; stages 1 to 3 have 4 and 11
    assert [(groups.block_bytes // page, groups.full, groups.states) for groups in found] == [
        (3, 1, 4), (4, 1, 3), (4, 1, 3), (4, 1, 3),
    ]  # fmt: skip


def test_the_labs_engine_keeps_windows_whole() -> None:
    groups = kv_groups(Layout(), load_spec("gpt-oss-120b"), 0, replace(SETTINGS, policy="labkit"))
    assert groups == KvGroups(16, 16 * 2 * 8 * 64 * 2 * 36, 1, 0, 0, 128)
