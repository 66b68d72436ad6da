"""Large models that are planned, not run: published totals and file sizes, hybrid layers, formats of few bits."""

from __future__ import annotations

import pytest
from tiny_config import read

from labkit.layout import Layout, check_layout, kv_bytes_per_token, rank_memory, weight_slices
from labkit.model.aliases import find_alias
from labkit.model.sizes import checkpoint_bytes, weights_by_part
from labkit.model.spec import ConfigError, Quantization, list_models, load_spec, model_dir, with_precision

# Bytes of all tensors, as each model's model.safetensors.index.json says (metadata.total_size) or as counted over its
# published files by others: deepseek-v3 and kimi-k2.5 are sizes of the files.
PUBLISHED_BYTES = {
    "llama-3.1-8b": 16_060_522_496,  # index of meta-llama/Llama-3.1-8B
    "llama-3.1-70b": 141_107_412_992,  # index of meta-llama/Llama-3.1-70B
    "mixtral-8x22b": 281_241_268_224,  # mistralai/Mixtral-8x22B-v0.1: payload of its 59 files
    "qwen3-30b-a3b": 61_064_245_248,  # index of Qwen/Qwen3-30B-A3B
    "qwen3-235b-a22b": 470_187_269_120,  # index of Qwen/Qwen3-235B-A22B
    "gpt-oss-120b": 65_248_815_744,  # tensors of openai/gpt-oss-120b's 15 files
    "deepseek-v3": 688_586_727_753,  # files of deepseek-ai/DeepSeek-V3 and -R1, draft module and headers included
    "kimi-k2.5": 595e9,  # moonshotai/Kimi-K2.5, the page's "595 GB": its picture tower is not counted here
}
# Where only the number of parameters is published.
PUBLISHED_PARAMETERS = {
    "minimax-m2.5": 229e9,
    "kimi-k2": 1.026e12,
    "qwen3.5-397b-a17b": 397e9,
    "llama-3.1-405b": 405.9e9,
}


@pytest.mark.parametrize(("name", "published"), PUBLISHED_BYTES.items())
def test_weights_are_within_one_percent_of_the_published_files(name: str, published: float) -> None:
    assert checkpoint_bytes(load_spec(name)) == pytest.approx(published, rel=0.002)


@pytest.mark.parametrize(("name", "published"), PUBLISHED_PARAMETERS.items())
def test_parameters_are_those_that_the_makers_name(name: str, published: float) -> None:
    assert load_spec(name).num_parameters == pytest.approx(published, rel=0.005)


@pytest.mark.parametrize("name", list_models())
def test_one_rank_holds_what_the_model_weighs(name: str) -> None:
    spec = load_spec(name)
    assert rank_memory(Layout(), spec, 0, spec.dtype_bytes) == weights_by_part(spec)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("minimax-m2.5", 10e9, 11.1e9), ("qwen3.5-397b-a17b", 17e9, 18e9), ("kimi-k2", 32e9, 33e9)],
)
def test_active_parameters_are_those_of_the_names(name: str, low: float, high: float) -> None:
    assert low < load_spec(name).num_active_parameters < high


# ---- hybrid layers


def test_only_every_fourth_layer_of_a_hybrid_keeps_tokens() -> None:
    spec = load_spec("Qwen/Qwen3.5-397B-A17B")
    assert spec.num_cached_layers == 15
    assert spec.kv_bytes_per_token(2) == 15 * 2 * 2 * 256 * 2
    assert kv_bytes_per_token(Layout(tp=2), spec, 0, 2) == 15 * 2 * 256 * 2
    linear = spec.linear_attention
    assert linear is not None
    assert (linear.channels, linear.state_numbers) == (2 * 16 * 128 + 64 * 128, 64 * 128 * 128)


def test_scores_of_a_hybrid_grow_with_its_full_layers_only() -> None:
    spec = load_spec("qwen3.5-397b-a17b")
    grown = spec.flops(1, 1000)["attention_scores"] - spec.flops(1, 0)["attention_scores"]
    assert grown == 15 * 4 * 32 * 256 * 1000


def test_linear_attention_is_cut_by_its_key_heads() -> None:
    spec = load_spec("qwen3.5-397b-a17b")
    assert check_layout(Layout(tp=16), spec)
    assert "key heads of linear attention ÷ tp 32" in str(check_layout(Layout(tp=32), spec))
    piece = weight_slices(Layout(tp=8), spec, 3)["model.layers.0.linear_attn.in_proj_qkv.v.weight"]
    assert (piece.start, piece.stop) == (3 * 8 * 128, 4 * 8 * 128)


# ---- formats


def test_mxfp4_groups_are_padded_where_they_do_not_divide() -> None:
    spec = load_spec("openai/gpt-oss-120b")
    assert check_layout(Layout(tp=8), spec)
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    pieces = [weight_slices(Layout(tp=8), spec, rank)[name] for rank in range(8)]
    assert [piece.local_shape for piece in pieces] == [(2880, 384)] * 8  # 90 groups of 32: 12 a rank
    assert [piece.stop - piece.start for piece in pieces] == [384] * 7 + [192]
    assert weight_slices(Layout(tp=8, ep=8), spec, 0)[name].local_shape == (2880, 2880)


def test_only_the_experts_of_kimi_are_in_four_bits() -> None:
    spec = load_spec("moonshotai/Kimi-K2.5")
    assert spec.quantization is not None
    assert spec.quantization.parts == {"experts"} and spec.quantization.group == (1, 32)
    attention = spec.parameters()["attention"]
    assert weights_by_part(spec)["attention"] == 2 * attention


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("", None),
        ("bf16", None),
        ("FP8", Quantization("fp8", 8, (0, 0), 4)),
        ("nvfp4", Quantization("nvfp4", 4, (1, 16), 1)),
        ("int4", Quantization("int4", 4, (1, 128))),
    ],
)
def test_a_precision_changes_the_matrices_only(precision: str, expected: Quantization | None) -> None:
    spec = with_precision(load_spec("llama-3.1-8b"), precision)
    assert spec.quantization == expected
    assert weights_by_part(spec)["embedding"] == 2 * 128_256 * 4096


def test_groups_of_a_precision_forbid_degrees() -> None:
    spec = with_precision(load_spec("qwen3-235b-a22b"), "fp8")
    assert "192 output features a rank at tp 8, ÷ fp8 group 128 = 1.5" in str(check_layout(Layout(tp=8), spec))
    assert check_layout(Layout(tp=8, ep=8), spec) and check_layout(Layout(tp=4), spec)


def test_what_is_published_in_fewer_bits_stays_so() -> None:
    spec = load_spec("gpt-oss-120b")
    assert with_precision(spec, "fp8") == with_precision(spec, "fp4") == spec
    assert with_precision(spec, "bf16").quantization is None
    with pytest.raises(ValueError, match="Precision 'fp7' is unknown: give bf16"):
        with_precision(spec, "fp7")


def test_a_list_of_modules_left_alone_is_read_by_whole_names() -> None:
    section = {"quant_method": "fp8", "modules_to_not_convert": ["gate", "model.layers.*.self_attn"]}
    found = read(quantization_config=section).quantization
    assert found is not None and found.parts == {"mlp", "experts", "shared_experts"}


# ---- names


@pytest.mark.parametrize(
    ("name", "folder", "precision"),
    [
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3", ""),
        ("DeepSeek-R1-0528", "deepseek-v3", ""),
        ("nvidia/Llama-3.1-8B-Instruct-FP8", "llama-3.1-8b", "fp8"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b", ""),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b", ""),
        ("Qwen/Qwen3-235B-A22B-FP8", "qwen3-235b-a22b", "fp8"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b-instruct-2507", ""),
        ("Qwen/Qwen3-235B-A22B-Thinking-2507", "qwen3-235b-a22b", ""),
        ("moonshotai/Kimi-K2-Thinking", "kimi-k2.5", ""),
        ("moonshotai/Kimi-K2-Instruct", "kimi-k2", ""),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b", ""),
    ],
)
def test_names_are_found_as_rows_spell_them(name: str, folder: str, precision: str) -> None:
    assert find_alias(name, list_models()) == (folder, precision)
    assert load_spec(name) == with_precision(load_spec(folder), precision)


def test_a_name_without_shapes_is_still_unknown() -> None:
    assert find_alias("openai/gpt-5", list_models()) is None
    with pytest.raises(FileNotFoundError, match="There is no model 'openai/gpt-5'"):
        load_spec("openai/gpt-5")


def test_an_unknown_name_is_told_its_nearest_and_where_all_are() -> None:
    with pytest.raises(FileNotFoundError) as told:
        load_spec("meta/Llama-3.1-9B")
    sentence = str(told.value)
    assert "llama-3.1-8b" in sentence and "mixtral" not in sentence and str(model_dir("lab-5m").parent) in sentence
    with pytest.raises(FileNotFoundError, match=f"one of the {len(list_models())} names that are listed in"):
        load_spec("nothing-alike-at-all")


def test_planned_families_are_refused_by_the_engine_with_a_sentence() -> None:
    for name in ("minimax-m2.5", "gpt-oss-120b", "qwen3.5-397b-a17b", "kimi-k2"):
        assert check_layout(Layout(), load_spec(name))
        assert "can be planned, not run" in str(check_layout(Layout(), load_spec(name), engine=True))


# ---- configs


def test_the_text_part_of_a_model_of_pictures_is_read() -> None:
    text = {"model_type": "llama", **{key: 64 for key in ("hidden_size", "intermediate_size", "vocab_size")}}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "rope_theta": 1e4, "rms_norm_eps": 1e-5}
    text |= {"max_position_embeddings": 128}
    spec = read(model_type="some_vl", text_config=text, tie_word_embeddings=True, quantization_config=None)
    assert spec.family == "llama" and spec.vocab_size == 64 and spec.tie_word_embeddings


def test_a_hybrid_without_its_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match="lacks linear_num_key_heads"):
        read(model_type="qwen3_next", head_dim=16)
