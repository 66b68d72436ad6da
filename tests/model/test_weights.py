"""Every way of cutting a model recombines into the same tensors, read from a file or made up from a seed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from labkit.layout import Layout, weight_slices
from labkit.model.checkpoint import CheckpointError, CheckpointSource, Weights, joined, open_source
from labkit.model.export import export_checkpoint
from labkit.model.random_weights import RandomSource, row_offsets
from labkit.model.spec import load_spec

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from thread_ranks import ThreadRanks, serve
from tiny_models import continuation, make_checkpoint, prompts

CPU = torch.device("cpu")


def shares(folder: Path, tp: int) -> list[Weights]:
    spec, layout = load_spec(folder), Layout(tp=tp)
    source = open_source(folder, spec, 0)
    return [Weights(source, weight_slices(layout, spec, r), torch.float32, CPU) for r in range(tp)]


@pytest.mark.parametrize("tp", [2, 4])
def test_shards_of_a_checkpoint_differ_and_recombine(tmp_path: Path, tp: int) -> None:
    folder = make_checkpoint(tmp_path, "llama-untied-biases")
    whole, ranks = load_file(folder / "model.safetensors"), shares(folder, tp)
    num_cut = 0
    for name, tensor in whole.items():
        parts, piece = [rank[name] for rank in ranks], ranks[0].slices[name]
        if piece.dim is None:
            assert all(torch.equal(part, tensor) for part in parts)
            continue
        num_cut += 1
        assert not any(torch.equal(parts[0], part) for part in parts[1:]), f"{name}: a rank has another's shard"
        assert torch.equal(torch.cat(parts, piece.dim)[: tensor.shape[0]], tensor)
    assert num_cut > 15


def test_kv_heads_are_replicated_over_neighbours(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen2-qkv-bias")
    whole = load_file(folder / "model.safetensors")["model.layers.0.self_attn.k_proj.weight"]
    parts = [rank["model.layers.0.self_attn.k_proj.weight"] for rank in shares(folder, 4)]
    assert torch.equal(parts[0], parts[1]) and torch.equal(parts[2], parts[3])
    assert torch.equal(torch.cat([parts[0], parts[2]]), whole)


def test_gate_and_up_are_each_cut_then_joined(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "mistral")
    whole = load_file(folder / "model.safetensors")
    gate, up = (whole[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    for number, rank in enumerate(shares(folder, 2)):
        fused = joined([rank[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")])
        rows = slice(number * 48, (number + 1) * 48)
        assert fused is not None and torch.equal(fused, torch.cat([gate[rows], up[rows]]))


def test_padding_of_the_vocabulary_is_zero(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "mistral")
    last = shares(folder, 4)[3]["lm_head.weight"]
    assert last.shape[0] == 38 and not last[-1].any() and last[-2].any()


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "mistral")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 96', '"intermediate_size": 88'))
    with pytest.raises(CheckpointError, match="has shape .* says"):
        shares(folder, 1)[0]["model.layers.0.mlp.up_proj.weight"]


# ---- random


@pytest.mark.parametrize("tp", [2, 8])
def test_random_weights_are_the_same_under_every_cut(tp: int) -> None:
    spec = load_spec("lab-5m")
    source = RandomSource(spec, 3)
    whole = Weights(source, weight_slices(Layout(), spec, 0), torch.float32, CPU)
    ranks = [
        Weights(RandomSource(spec, 3), weight_slices(Layout(tp=tp), spec, r), torch.float32, CPU) for r in range(tp)
    ]
    for name, piece in ranks[0].slices.items():
        if piece.dim is not None and piece.replicated_over == 1:
            assert torch.equal(torch.cat([rank[name] for rank in ranks], piece.dim), whole[name]), name


def test_random_weights_have_the_sizes_that_keep_activations_near_one() -> None:
    spec = load_spec("lab-5m")
    weights = Weights(RandomSource(spec, 0), weight_slices(Layout(), spec, 0), torch.float32, CPU)
    assert torch.equal(weights["model.norm.weight"], torch.ones(256))
    expected = {
        "model.layers.1.mlp.gate_proj.weight": 256**-0.5,
        "model.layers.1.mlp.down_proj.weight": (768 * 2 * spec.num_layers) ** -0.5,
        "model.embed_tokens.weight": 0.02,
    }
    for name, std in expected.items():
        assert weights[name].std().item() == pytest.approx(std, rel=0.02)
        assert abs(weights[name].mean().item()) < 0.02 * std * 5


def test_no_two_rows_of_a_tensor_and_no_two_tensors_are_alike() -> None:
    offsets = [row_offsets(0, name, 0, 1 << 17) for name in ("a", "b")]
    assert all(len(found.unique()) == 1 << 17 for found in offsets)
    assert (offsets[0] == offsets[1]).float().mean() < 0.01
    assert torch.equal(row_offsets(0, "a", 100, 200), offsets[0][100:200])
    assert not torch.equal(row_offsets(1, "a", 0, 100), offsets[0][:100])


def test_an_exported_checkpoint_holds_what_the_ranks_made_up(tmp_path: Path) -> None:
    folder = export_checkpoint("lab-5m", tmp_path / "out", seed=4, shard_bytes=4 << 20)
    assert len(list(folder.glob("*.safetensors"))) > 1
    spec = load_spec("lab-5m")
    slices = weight_slices(Layout(), spec, 0)
    made_up = Weights(RandomSource(spec, 4), slices, torch.float32, CPU)
    read = Weights(CheckpointSource(folder), slices, torch.float32, CPU)
    assert all(torch.equal(made_up[name], read[name]) for name in slices)


def test_transformers_goes_on_as_we_do_from_an_exported_checkpoint(tmp_path: Path) -> None:
    folder = export_checkpoint("lab-5m", tmp_path / "out", seed=4)
    asked = prompts([7, 20])
    ours = serve(ThreadRanks("lab-5m", "tp2", seed=4, memory_bytes=40 << 20), asked, 6)
    assert [seq.tokens for seq in ours] == [continuation(folder, prompt, 6)[0] for prompt in asked]


def test_an_export_does_not_mix_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "old.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="already holds safetensors"):
        export_checkpoint("lab-5m", tmp_path)
